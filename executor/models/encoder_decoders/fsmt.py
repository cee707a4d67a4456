"""FSMT, the translation models of fairseq (arXiv:1907.06616)."""

from quire.executor.models.encoder_decoders.bart import M2M100ForConditionalGeneration


class FSMTForConditionalGeneration(M2M100ForConditionalGeneration):
    """Norms after blocks; the sinusoids of M2M100; encoder and decoder have a vocabulary each."""

    HEAD = "model.decoder.output_projection"
    norms_first = False
