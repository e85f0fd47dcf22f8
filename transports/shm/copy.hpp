// Copy kernels between mapped memories: the whole data path of the shared-memory transport, and the
// floor that the benchmarks compare it with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvferry {

/// One contiguous copy; the two ranges do not overlap. Any alignment, any length.
struct CopyPiece {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

enum class CopyKind : std::uint8_t {
  cached,    ///< through the caches: best while source and destination fit into them
  streaming  ///< around the caches (non-temporal stores): best for batches larger than they are
};

/// The kind for a piece of a transfer of `transfer_bytes`; `streaming_bytes` is ShmConfig's field (0 = never).
constexpr CopyKind choose_copy(std::uint64_t transfer_bytes, std::uint64_t streaming_bytes) noexcept {
  return streaming_bytes != 0 && transfer_bytes >= streaming_bytes ? CopyKind::streaming : CopyKind::cached;
}

/// Copies all pieces, streamed ones fetching the next one early. On return
/// the bytes are visible to every thread that synchronizes with this one, streamed ones included.
void shm_copy(std::span<const CopyPiece> pieces, CopyKind kind) noexcept;

/// The widest streaming kernel that this processor has: "avx512", "avx2", "sse2" or "memcpy" (none).
std::string_view streaming_kernel_name() noexcept;

namespace shm {

/// Copies `lines` whole cache lines of 64 bytes to an address that is a multiple of 64. `next` is
/// what will be copied afterwards (`next_bytes` of it), to be fetched early; may be nullptr.
using StreamLines = void (*)(std::byte* to, const std::byte* from, std::size_t lines, const std::byte* next,
                             std::size_t next_bytes);

struct StreamKernel {
  std::string_view name;
  StreamLines lines = nullptr;
};

/// The kernels that this processor can run, best first; for tests and measurements.
std::span<const StreamKernel> stream_kernels() noexcept;

/// shm_copy(..., CopyKind::streaming) with a given kernel.
void stream_copy(std::span<const CopyPiece> pieces, StreamLines lines) noexcept;

}  // namespace shm
}  // namespace kvferry
