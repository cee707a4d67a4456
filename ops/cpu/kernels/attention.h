// Causal attention that reads pages in place, without gathering them. `quire.ops.backend` defines the operation.
//
// The work is cut into items: (request, up to MAX_ROWS / G consecutive queries, a few KV heads, all or some keys), where
// G query heads share a KV head. A query of one head is a "row". One thread takes an item and walks over its keys in
// tiles of KEYS with an online softmax (arXiv:2112.05682, 2205.14135). For each tile, head by head, the keys and values
// are packed once for all rows of the item:
//
//     keys   [units of head_dim][KEYS]          transposed, so that a vector holds one dimension of many keys
//     values [units of KEYS][head_dim]
//
// After packing, scores = queries * keys and out += weights * values are the same small matrix product. An item with
// few rows reads keys and values in place instead, with the same sums: the keys of all heads, head by head, then the
// values. A unit (units.h) is what one multiply-add instruction takes per lane: a float, or a pair of bfloat16 if the
// processor multiplies pairs (summed in float32), with vectors (tiles.h) or tiles (tiles_amx.h), or a pair of int16 if
// keys and values are whole codes (tiles_codes.h).
//
// Tiles begin at multiples of KEYS, softmaxes start again at multiples of SPLIT, and each row is computed on its own.
// So a query's result depends neither on the batch, nor on the number of threads, nor on how a prompt was cut into
// chunks.
#pragma once

#include "kernels.h"
#include "tiles.h"
#include "tiles_amx.h"
#include "tiles_codes.h"

namespace quire {

// Computes a call on its threads, with queries and weights in units of this type. attention_items.h defines it, and is
// compiled for a few types a source, because that takes long.
template <class Unit, class Cache> void attend(const AttentionCall& call);

}  // namespace quire
