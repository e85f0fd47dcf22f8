#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include <kvferry/kvcache/staging.hpp>

namespace kvferry {
namespace {

void add_copy(std::vector<StagingCopy>& copies, std::uint64_t region, std::uint64_t staging, std::uint64_t length) {
  // Staging offsets only grow, so a copy that touches in the region touches in the buffer as well.
  if (!copies.empty() && copies.back().region_offset + copies.back().length == region)
    copies.back().length += length;
  else
    copies.push_back({region, staging, length});
}

void add_run(StagingRound& round, std::uint64_t source, std::uint64_t destination, std::uint64_t length) {
  add_copy(round.pack, source, round.bytes, length);
  add_copy(round.unpack, destination, round.bytes, length);
  round.bytes += length;
  round.source_end = std::max(round.source_end, source + length);
  round.destination_end = std::max(round.destination_end, destination + length);
}

bool wraps(std::uint64_t offset, std::uint64_t length) noexcept {
  return length > std::numeric_limits<std::uint64_t>::max() - offset;
}

Status check_room(std::string_view verb, std::string_view what, std::uint64_t has, std::uint64_t needs) {
  if (has >= needs) return {};
  return {Errc::out_of_bounds,
          fmt::format("KV staging: {}: the {} has {} bytes, but the round needs {}", verb, what, has, needs)};
}

}  // namespace

Result<StagedPlan> stage_plan(std::span<const Slice> plan, Initiator initiator, const StagingOptions& options) {
  if (options.buffer_bytes < options.threshold)
    return {Errc::invalid_argument, fmt::format("KV staging: a buffer of {} bytes is smaller than the threshold of {}",
                                                options.buffer_bytes, options.threshold)};
  StagedPlan staged;
  const bool reads = initiator == Initiator::destination;
  for (const Slice& run : plan) {
    if (run.length >= options.threshold) {
      staged.direct.push_back(run);
      continue;
    }
    if (run.length == 0) continue;
    if (wraps(run.local_offset, run.length) || wraps(run.remote_offset, run.length))
      return {Errc::out_of_bounds, fmt::format("KV staging: slice ({}, {}, {}) reaches beyond 64 bits",
                                               run.local_offset, run.remote_offset, run.length)};
    if (staged.rounds.empty() || run.length > options.buffer_bytes - staged.rounds.back().bytes)
      staged.rounds.emplace_back();
    add_run(staged.rounds.back(), reads ? run.remote_offset : run.local_offset,
            reads ? run.local_offset : run.remote_offset, run.length);
  }
  return staged;
}

Status pack(const StagingRound& round, std::span<const std::byte> region, std::span<std::byte> staging) {
  if (Status status = check_room("pack", "source region", region.size(), round.source_end); !status) return status;
  if (Status status = check_room("pack", "staging buffer", staging.size(), round.bytes); !status) return status;
  for (const StagingCopy& copy : round.pack)
    std::memcpy(staging.data() + copy.staging_offset, region.data() + copy.region_offset, copy.length);
  return {};
}

Status unpack(const StagingRound& round, std::span<const std::byte> staging, std::span<std::byte> region) {
  if (Status status = check_room("unpack", "destination region", region.size(), round.destination_end); !status)
    return status;
  if (Status status = check_room("unpack", "staging buffer", staging.size(), round.bytes); !status) return status;
  for (const StagingCopy& copy : round.unpack)
    std::memcpy(region.data() + copy.region_offset, staging.data() + copy.staging_offset, copy.length);
  return {};
}

}  // namespace kvferry
