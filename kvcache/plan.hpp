// From two layouts and two block tables to the slices of one transfer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvferry/kvcache/layout.hpp>
#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// Numbers [first, end).
struct IndexRange {
  std::uint32_t first = 0;
  std::uint32_t end = 0;

  std::uint32_t count() const noexcept { return end - first; }
};

/// One sequence on one rank. Owns nothing: layout and block table must outlive the call.
struct PlanSide {
  const Layout* layout = nullptr;
  /// The sequence's block table from its first token on: blocks[i] holds tokens
  /// [i * block_tokens, (i + 1) * block_tokens). Blocks outside the token range are not looked at.
  std::span<const BlockId> blocks;
  std::uint32_t rank = 0;  ///< of the layout's tp_size
};

/// Who starts the transfer, and so whose offsets are a slice's local ones.
enum class Initiator : std::uint8_t {
  destination,  ///< reads: local offsets are the destination's
  source,       ///< writes: local offsets are the source's
};

/// Which region the slices address.
enum class Payload : std::uint8_t { values, scales };

struct PlanRequest {
  PlanSide source;
  PlanSide destination;
  IndexRange tokens;  ///< positions in the sequence, the same on both sides
  IndexRange layers;
  Initiator initiator = Initiator::destination;
  Payload payload = Payload::values;
};

/// The slices that copy the asked tokens and layers of every head that both ranks hold and that
/// this source rank sends to this destination rank (sends_heads). Each slice is as long as bytes
/// are contiguous on both sides, and no two could be joined; they come in ascending order of local
/// offsets. Empty when a range is, or when this pair of ranks has nothing to exchange.
///
/// A pure function: safe on any thread. Time grows with the number of slices, about 10 ns for each
/// (docs/kvcache.md has the measurement); only unusual orders of dimensions cost a sort on top.
///
/// Errors: unsupported (check_exchange), invalid_argument (no layout, a rank not below tp_size, a
/// range that ends before it begins, scales of a layout without, a destination block used for two
/// places of the sequence), out_of_bounds (a layer or block id that the layout does not have, a
/// block table that is too short for the token range).
Result<std::vector<Slice>> make_plan(const PlanRequest& request);

/// Whether `source_rank` sends heads to `destination_rank`, given two layouts that can exchange and
/// ranks below their tp_size.
///
/// The rule: every head that a destination rank holds comes to it from exactly one source rank. When
/// a head is on S source ranks (its replicas, numbered from 0) and on D destination ranks, the
/// destination's replica j takes it from the source's replica floor(j * S / D). So equal tensor-
/// parallel sizes pair rank with equal rank, and destinations spread evenly over the replicas.
bool sends_heads(const Layout& source, std::uint32_t source_rank, const Layout& destination,
                 std::uint32_t destination_rank) noexcept;

/// The source ranks that together give `destination_rank` all its heads, ascending.
std::vector<std::uint32_t> source_ranks_of(const Layout& source, const Layout& destination,
                                           std::uint32_t destination_rank);

}  // namespace kvferry
