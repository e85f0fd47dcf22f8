// What one case moves: which slices, where the blocks lie in the two regions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry::bench {

/// How the blocks of a batch lie in both regions.
enum class Pattern : std::uint8_t {
  contiguous,  ///< one after the other: neighbours merge
  strided,     ///< a free block between any two
  random       ///< scattered, differently on both sides, as a block table scatters KV blocks
};

std::string_view to_string(Pattern pattern) noexcept;
Result<Pattern> parse_pattern(std::string_view text);

/// A batch, once per concurrent transfer; each has its own part of the two regions.
struct Workload {
  Pattern pattern = Pattern::random;
  std::uint64_t block_size = 0;  ///< bytes
  std::uint32_t batch_size = 0;  ///< blocks in one transfer
  std::uint32_t parts = 1;       ///< transfers in flight together
  std::uint64_t seed = 1;

  std::uint64_t part_bytes() const noexcept;
  /// What each of the two regions must hold.
  std::uint64_t region_bytes() const noexcept { return part_bytes() * parts; }
  std::uint64_t transfer_bytes() const noexcept { return block_size * batch_size; }
};

/// The slices of one part, block i of the batch at index i; offsets count from the region's start.
/// The same workload gives the same slices in every process.
std::vector<Slice> make_slices(const Workload& workload, std::uint32_t part);

/// The side a region is on: which of a slice's offsets counts there.
enum class Side : std::uint8_t { local, remote };

constexpr std::uint64_t offset_on(Side side, const Slice& slice) noexcept {
  return side == Side::local ? slice.local_offset : slice.remote_offset;
}

}  // namespace kvferry::bench
