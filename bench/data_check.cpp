#include "bench/data_check.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "bench/random.hpp"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t word_step = 0x9e3779b97f4a7c15ULL;

/// Words are compared in runs: a run without a difference needs no branch per word.
constexpr std::size_t run_words = 512;

std::uint64_t load_word(const std::byte* at) noexcept {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

bool run_differs(const std::byte* at, std::size_t words, std::uint64_t word) noexcept {
  std::uint64_t difference = 0;
  for (std::size_t i = 0; i < words; ++i) difference |= load_word(at + 8 * i) ^ (word + i * word_step);
  return difference != 0;
}

std::optional<std::uint64_t> find_in(std::span<const std::byte> bytes, std::uint64_t begin, std::uint64_t end,
                                     std::uint64_t key) noexcept {
  for (std::uint64_t offset = begin; offset < end; ++offset) {
    if (bytes[offset] != expected_byte(key, offset)) return offset;
  }
  return std::nullopt;
}

/// First byte in the gap that is not poison.
std::optional<std::uint64_t> find_stray(std::span<const std::byte> gap) noexcept {
  const auto stray = std::find_if(gap.begin(), gap.end(), [](std::byte byte) { return byte != poison; });
  if (stray == gap.end()) return std::nullopt;
  return static_cast<std::uint64_t>(stray - gap.begin());
}

std::optional<Mismatch> verify_blocks(std::span<const std::byte> region, const Workload& workload, Side side,
                                      std::uint64_t round, std::uint32_t part, const std::vector<Slice>& slices) {
  for (std::uint64_t block = 0; block < slices.size(); ++block) {
    const auto bytes = region.subspan(offset_on(side, slices[block]), slices[block].length);
    const std::uint64_t key = block_key(workload.seed, round, std::uint64_t{part} * workload.batch_size + block);
    if (const auto at = find_difference(bytes, key)) {
      return Mismatch{part, block, *at, expected_byte(key, *at), bytes[*at]};
    }
  }
  return std::nullopt;
}

std::optional<Mismatch> verify_gaps(std::span<const std::byte> region, const Workload& workload, Side side,
                                    std::uint32_t part, const std::vector<Slice>& slices) {
  std::vector<std::uint64_t> starts(slices.size());
  std::transform(slices.begin(), slices.end(), starts.begin(), [side](const Slice& s) { return offset_on(side, s); });
  std::sort(starts.begin(), starts.end());
  std::uint64_t gap_begin = part * workload.part_bytes();
  starts.push_back(gap_begin + workload.part_bytes());
  for (const std::uint64_t start : starts) {
    if (const auto at = find_stray(region.subspan(gap_begin, start - gap_begin))) {
      return Mismatch{part, std::nullopt, gap_begin + *at, poison, region[gap_begin + *at]};
    }
    gap_begin = start + workload.block_size;
  }
  return std::nullopt;
}

}  // namespace

std::uint64_t block_key(std::uint64_t seed, std::uint64_t round, std::uint64_t block) noexcept {
  return mix(mix(mix(seed) + round) + block);
}

void fill_block(std::span<std::byte> block, std::uint64_t key) noexcept {
  const std::size_t words = block.size() / 8;
  std::uint64_t word = key;
  for (std::size_t i = 0; i < words; ++i, word += word_step) std::memcpy(block.data() + 8 * i, &word, 8);
  std::memcpy(block.data() + 8 * words, &word, block.size() % 8);
}

std::byte expected_byte(std::uint64_t key, std::uint64_t offset) noexcept {
  const std::uint64_t word = key + (offset / 8) * word_step;
  std::byte bytes[8];
  std::memcpy(bytes, &word, 8);
  return bytes[offset % 8];
}

std::optional<std::uint64_t> find_difference(std::span<const std::byte> block, std::uint64_t key) noexcept {
  const std::size_t words = block.size() / 8;
  for (std::size_t first = 0; first < words; first += run_words) {
    const std::size_t run = std::min(run_words, words - first);
    if (run_differs(block.data() + 8 * first, run, key + first * word_step)) {
      return find_in(block, 8 * first, 8 * (first + run), key);
    }
  }
  return find_in(block, 8 * words, block.size(), key);
}

std::string Mismatch::to_string() const {
  const std::string values = fmt::format("expected 0x{:02x}, got 0x{:02x}", std::to_integer<unsigned>(expected),
                                         std::to_integer<unsigned>(got));
  if (!block) return fmt::format("part {}, outside every block, region offset {}: {}", part, offset, values);
  return fmt::format("part {}, block {}, byte {}: {}{}", part, *block, offset, values,
                     got == poison ? " (as before the transfer)" : "");
}

void fill_blocks(std::span<std::byte> region, const Workload& workload, Side side, std::uint64_t round) {
  for (std::uint32_t part = 0; part < workload.parts; ++part) {
    std::uint64_t block = std::uint64_t{part} * workload.batch_size;
    for (const Slice& slice : make_slices(workload, part)) {
      fill_block(region.subspan(offset_on(side, slice), slice.length), block_key(workload.seed, round, block++));
    }
  }
}

void poison_region(std::span<std::byte> region, const Workload& workload) {
  std::memset(region.data(), std::to_integer<int>(poison), workload.region_bytes());
}

std::optional<Mismatch> verify_region(std::span<const std::byte> region, const Workload& workload, Side side,
                                      std::uint64_t round) {
  for (std::uint32_t part = 0; part < workload.parts; ++part) {
    const auto slices = make_slices(workload, part);
    if (auto mismatch = verify_blocks(region, workload, side, round, part, slices)) return mismatch;
    if (auto mismatch = verify_gaps(region, workload, side, part, slices)) return mismatch;
  }
  return std::nullopt;
}

}  // namespace kvferry::bench
