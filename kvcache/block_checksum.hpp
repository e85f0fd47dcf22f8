// Checksums of KV blocks that come out the same wherever and in whatever order the bytes lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvferry/kvcache/layout.hpp>
#include <kvferry/kvcache/plan.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// What is hashed of one sequence on one rank.
struct ChecksumRequest {
  PlanSide side;
  Payload payload = Payload::values;
  IndexRange tokens;              ///< positions in the sequence
  std::uint32_t unit_tokens = 1;  ///< tokens of one checksum: the block size of the destination
  HeadRange heads;                ///< of the model; this rank must hold them all
};

/// XXH3 (64 bits) over each unit of one layer: the tokens [i * unit_tokens, (i + 1) * unit_tokens) of the sequence as
/// far as they are in the token range, from the unit with its first token on. The bytes go in by part, token and head,
/// so both ends of a transfer get the same numbers whatever their layouts are; layer and unit go in too, so a block at
/// a wrong place shows. `region` is the rank's host memory. Any thread.
/// Errors: invalid_argument, out_of_bounds, as make_plan has them.
Result<std::vector<std::uint64_t>> block_checksums(const ChecksumRequest& request, std::uint32_t layer,
                                                   std::span<const std::byte> region);

}  // namespace kvferry
