"""A worker's place among the workers of one model, and how many there are."""

from msgspec import Struct


class Rank(Struct, array_like=True, frozen=True):
    """A worker's coordinates. Workers that differ in one of them divide something among each other.

    Attributes:
        data: engines divide the requests.
        pipeline: stages divide the layers.
        tensor: the weights of each layer are divided.
        expert: the experts of each layer are divided, also over engines that share them.
        prefill: the tokens of each step are divided, and the positions of sequences.
    """

    data: int = 0
    pipeline: int = 0
    tensor: int = 0
    expert: int = 0
    prefill: int = 0

    @property
    def is_first(self) -> bool:
        """True if this worker logs for all workers of the same copy of the model."""
        return not (self.pipeline or self.prefill or self.tensor)

    def __str__(self) -> str:
        """For logs: the tensor coordinate, and those of the others that are not 0: `tp1`, `dp2-pp1-tp0`."""
        names = {"dp": self.data, "pp": self.pipeline, "pcp": self.prefill, "tp": self.tensor, "ep": self.expert}
        return "-".join(f"{name}{value}" for name, value in names.items() if value or name == "tp")


class Layout(Struct, frozen=True, kw_only=True):
    """The number of parts into which each coordinate of a `Rank` divides.

    Attributes:
        data: engines, each with a whole copy of the model, or of all but its experts.
        pipeline: stages of one engine.
        prefill: copies of a stage's weights, each on `tensor` workers, which divide the tokens of each step and the
            positions of sequences.
        tensor: workers of one such copy.
        context: neighbouring workers of a copy that hold the same KV heads, and divide the positions of sequences.
        expert: workers that divide the experts of a layer among them, whole, in one engine or in all of them together;
            1: experts are divided as `tensor` says.
        nodes: hosts over which the workers of one engine are spread, in the order of their numbers. So the ranks that
            talk most, those of one stage, are neighbours.
    """

    data: int = 1
    pipeline: int = 1
    prefill: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    nodes: int = 1

    @property
    def num_workers(self) -> int:
        """Workers of one engine."""
        return self.pipeline * self.stage_size

    @property
    def stage_size(self) -> int:
        """Workers of one pipeline stage."""
        return self.prefill * self.tensor

    @property
    def sequence(self) -> int:
        """Workers that divide the positions of a sequence."""
        return self.prefill * self.context

    @property
    def shares_experts(self) -> bool:
        """True if all engines together hold one set of experts. They then run, and end, together."""
        return self.expert > self.tensor

    @property
    def world_size(self) -> int:
        """The number of ranks that communicate: those of one engine, or of all engines that share experts."""
        return self.num_workers * (self.data if self.shares_experts else 1)

    def reports(self, rank: Rank) -> bool:
        """Returns True if the worker's results are its engine's: the last stage samples, and its workers agree."""
        return rank.pipeline == self.pipeline - 1 and not (rank.prefill or rank.tensor)

    def number(self, rank: Rank) -> int:
        """The worker's place in `ranks` of its engine."""
        return (rank.pipeline * self.prefill + rank.prefill) * self.tensor + rank.tensor

    @property
    def num_local(self) -> int:
        """Workers of one engine on each of its hosts."""
        return self.num_workers // self.nodes

    def local_index(self, rank: Rank) -> int:
        """The number of a worker among those of its engine on its host; also that of its device."""
        return self.number(rank) % self.num_local

    def node(self, rank: Rank) -> int:
        """The number of a worker's host, where workers of engines are spread over several."""
        return rank.data * self.nodes + self.number(rank) // self.num_local

    def ranks_of_node(self, node: int, data: int = 0) -> list[Rank]:
        """The workers of engine number `data` on host number `node`."""
        return self.ranks(data)[node * self.num_local : (node + 1) * self.num_local]

    def ranks(self, data: int = 0) -> list[Rank]:
        """The workers of engine number `data`, stage by stage, in the order of `number`."""
        first_expert = data * self.tensor if self.shares_experts else 0
        return [
            Rank(
                data=data,
                pipeline=stage,
                prefill=copy,
                tensor=place,
                expert=first_expert + place if self.expert > 1 else 0,
            )
            for stage in range(self.pipeline)
            for copy in range(self.prefill)
            for place in range(self.tensor)
        ]


class EnginePlace(Struct, array_like=True, frozen=True):
    """The place of this engine in the layout, and among the engines on its host.

    Attributes:
        data: its number among all engines; the data coordinate of its workers.
        local: its number among the engines on this host.
        num_local: engines on this host, which share its cores and memory.
    """

    data: int = 0
    local: int = 0
    num_local: int = 1
