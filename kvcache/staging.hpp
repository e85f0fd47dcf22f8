// Short runs travel together: packed into a staging buffer, sent as one slice, unpacked at the other end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvferry/kvcache/plan.hpp>
#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

struct StagingOptions {
  /// Runs shorter than this are packed; bytes. 0 packs nothing.
  std::uint64_t threshold = 512;
  /// Size of the staging buffer on each side; bytes, at least `threshold`.
  std::uint64_t buffer_bytes = 8u << 20;
};

/// One memcpy between a region and a staging buffer; offsets and length in bytes.
struct StagingCopy {
  std::uint64_t region_offset = 0;
  std::uint64_t staging_offset = 0;
  std::uint64_t length = 0;

  friend bool operator==(const StagingCopy&, const StagingCopy&) = default;
};

/// One filling of the staging buffers: bytes [0, bytes) of the source's buffer go to the same place
/// in the destination's.
struct StagingRound {
  std::vector<StagingCopy> pack;    ///< from the source's region
  std::vector<StagingCopy> unpack;  ///< to the destination's region
  std::uint64_t bytes = 0;
  std::uint64_t source_end = 0;       ///< the source's region must have at least so many bytes
  std::uint64_t destination_end = 0;  ///< and the destination's so many

  /// What is sent of the staging buffers.
  Slice slice() const noexcept { return {0, 0, bytes}; }
};

/// A plan divided in two: slices that go from region to region, and rounds of staging.
struct StagedPlan {
  std::vector<Slice> direct;
  std::vector<StagingRound> rounds;
};

/// Divides a plan by the length of its runs. Copies that touch on their side are joined, so packing
/// or unpacking may need far fewer than the plan has slices. A pure function: both sides that compute
/// it from the same plan agree on every byte's place in the buffer. `initiator` is the plan's own.
/// Errors: invalid_argument (a buffer smaller than the threshold), out_of_bounds (a slice whose end is
/// beyond 64 bits; make_plan gives none).
Result<StagedPlan> stage_plan(std::span<const Slice> plan, Initiator initiator, const StagingOptions& options = {});

/// Fills the source's staging buffer; host memory on both sides, any thread, and nobody else may write
/// either meanwhile. The buffer may be sent once this returns, and filled again once the destination
/// has unpacked it. Error: out_of_bounds (region or buffer is too small; nothing was copied).
Status pack(const StagingRound& round, std::span<const std::byte> region, std::span<std::byte> staging);

/// Empties the destination's staging buffer into its region; the same rules.
Status unpack(const StagingRound& round, std::span<const std::byte> staging, std::span<std::byte> region);

}  // namespace kvferry
