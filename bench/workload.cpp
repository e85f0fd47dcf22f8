#include "bench/workload.hpp"

#include <numeric>

#include <fmt/core.h>

#include "bench/random.hpp"

namespace kvferry::bench {
namespace {

/// Scattered and strided blocks lie in a pool of twice their number, so that there is room between.
constexpr std::uint64_t pool_factor = 2;

std::vector<std::uint32_t> scattered_slots(const Workload& workload, std::uint64_t seed) {
  std::vector<std::uint32_t> slots(workload.batch_size * pool_factor);
  std::iota(slots.begin(), slots.end(), 0u);
  Random random(seed);
  shuffle(slots, random);
  slots.resize(workload.batch_size);
  return slots;
}

std::vector<Slice> place(const Workload& workload, std::uint64_t base, auto&& local_slot, auto&& remote_slot) {
  std::vector<Slice> slices(workload.batch_size);
  for (std::uint32_t block = 0; block < workload.batch_size; ++block) {
    slices[block] = {base + local_slot(block) * workload.block_size, base + remote_slot(block) * workload.block_size,
                     workload.block_size};
  }
  return slices;
}

}  // namespace

std::string_view to_string(Pattern pattern) noexcept {
  switch (pattern) {
    case Pattern::contiguous:
      return "contiguous";
    case Pattern::strided:
      return "strided";
    case Pattern::random:
      return "random";
  }
  return "unknown";
}

Result<Pattern> parse_pattern(std::string_view text) {
  for (const Pattern pattern : {Pattern::contiguous, Pattern::strided, Pattern::random}) {
    if (text == to_string(pattern)) return pattern;
  }
  return Status(Errc::invalid_argument, fmt::format("'{}' is none of contiguous, strided, random", text));
}

std::uint64_t Workload::part_bytes() const noexcept {
  return transfer_bytes() * (pattern == Pattern::contiguous ? 1 : pool_factor);
}

std::vector<Slice> make_slices(const Workload& workload, std::uint32_t part) {
  const std::uint64_t base = part * workload.part_bytes();
  const std::uint64_t step = workload.pattern == Pattern::strided ? pool_factor : 1;
  if (workload.pattern != Pattern::random) {
    const auto slot = [step](std::uint64_t block) { return block * step; };
    return place(workload, base, slot, slot);
  }
  const auto local = scattered_slots(workload, mix(workload.seed) + 2 * part);
  const auto remote = scattered_slots(workload, mix(workload.seed) + 2 * part + 1);
  return place(
      workload, base, [&](std::uint32_t block) { return std::uint64_t{local[block]}; },
      [&](std::uint32_t block) { return std::uint64_t{remote[block]}; });
}

}  // namespace kvferry::bench
