#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <kvferry/transports/shm/copy.hpp>

namespace kvferry {
namespace shm {
namespace {

constexpr std::size_t line_bytes = 64;
/// Below this a piece is not worth a detour around the caches: its partial lines would dominate.
constexpr std::size_t least_streamed_bytes = 512;
/// How far ahead of the copy the source is fetched. Hardware prefetchers stop at the end of a 4 KiB
/// page, so for scattered pages it is this that hides the memory's latency.
constexpr std::size_t fetch_ahead_bytes = 2048;

#if defined(__x86_64__)

/// Where to fetch while the line at `done` of `total` bytes is copied: further on in this piece or
/// already in the next one.
struct FetchPlan {
  const std::byte* from;
  std::size_t total;
  const std::byte* next;
  std::size_t next_bytes;

  const std::byte* at(std::size_t done) const noexcept {
    const std::size_t ahead = done + fetch_ahead_bytes;
    if (ahead < total) return from + ahead;
    return next != nullptr && ahead - total < next_bytes ? next + (ahead - total) : from + done;
  }
};

constexpr std::size_t block_lines = 4;
constexpr std::size_t block_bytes = block_lines * line_bytes;

// The three kernels differ in their instructions alone; each needs its own target attribute, which
// keeps them from sharing an inlined body.

__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from, std::size_t lines,
                                                      const std::byte* next, std::size_t next_bytes) {
  const FetchPlan plan{from, lines * line_bytes, next, next_bytes};
  std::size_t done = 0;
  for (; lines >= block_lines; lines -= block_lines, done += block_bytes) {
    const std::byte* ahead = plan.at(done);
    for (std::size_t line = 0; line < block_bytes; line += line_bytes)
      _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
    const __m512i a = _mm512_loadu_si512(from + done);
    const __m512i b = _mm512_loadu_si512(from + done + 64);
    const __m512i c = _mm512_loadu_si512(from + done + 128);
    const __m512i d = _mm512_loadu_si512(from + done + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done + 192), d);
  }
  for (; lines > 0; --lines, done += line_bytes)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done), _mm512_loadu_si512(from + done));
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from, std::size_t lines,
                                                 const std::byte* next, std::size_t next_bytes) {
  const FetchPlan plan{from, lines * line_bytes, next, next_bytes};
  for (std::size_t done = 0; lines > 0; --lines, done += line_bytes) {
    if (done % block_bytes == 0) {
      const std::byte* ahead = plan.at(done);
      for (std::size_t line = 0; line < block_bytes; line += line_bytes)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
    }
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done + 32), b);
  }
}

void stream_sse2(std::byte* to, const std::byte* from, std::size_t lines, const std::byte* next,
                 std::size_t next_bytes) {
  const FetchPlan plan{from, lines * line_bytes, next, next_bytes};
  for (std::size_t done = 0; lines > 0; --lines, done += line_bytes) {
    if (done % block_bytes == 0) {
      const std::byte* ahead = plan.at(done);
      for (std::size_t line = 0; line < block_bytes; line += line_bytes)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
    }
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done + 16));
    const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done + 32));
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done + 48));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + done), a);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + done + 16), b);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + done + 32), c);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + done + 48), d);
  }
}

/// Streaming stores are ordered by nothing but this.
void order_streamed_stores() noexcept { _mm_sfence(); }

struct KernelList {
  std::array<StreamKernel, 3> kernels;
  std::size_t count = 0;

  KernelList() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) kernels[count++] = {"avx512", stream_avx512};
    if (__builtin_cpu_supports("avx2")) kernels[count++] = {"avx2", stream_avx2};
    kernels[count++] = {"sse2", stream_sse2};
  }
};

#else

void order_streamed_stores() noexcept {}

struct KernelList {
  std::array<StreamKernel, 1> kernels;
  std::size_t count = 0;
};

#endif

void cached_copy(std::span<const CopyPiece> pieces) noexcept {
  for (const CopyPiece& piece : pieces)
    if (piece.bytes > 0) std::memcpy(piece.to, piece.from, piece.bytes);
}

void stream_piece(const CopyPiece& piece, const CopyPiece& next, StreamLines stream) noexcept {
  if (piece.bytes < least_streamed_bytes) {
    if (piece.bytes > 0) std::memcpy(piece.to, piece.from, piece.bytes);
    return;
  }
  const std::size_t head = (line_bytes - reinterpret_cast<std::uintptr_t>(piece.to) % line_bytes) % line_bytes;
  const std::size_t lines = (piece.bytes - head) / line_bytes;
  const std::size_t tail = piece.bytes - head - lines * line_bytes;
  if (head > 0) std::memcpy(piece.to, piece.from, head);
  stream(piece.to + head, piece.from + head, lines, next.from, next.bytes);
  if (tail > 0) std::memcpy(piece.to + piece.bytes - tail, piece.from + piece.bytes - tail, tail);
}

}  // namespace

std::span<const StreamKernel> stream_kernels() noexcept {
  static const KernelList list;
  return {list.kernels.data(), list.count};
}

void stream_copy(std::span<const CopyPiece> pieces, StreamLines lines) noexcept {
  for (std::size_t i = 0; i < pieces.size(); ++i)
    stream_piece(pieces[i], i + 1 < pieces.size() ? pieces[i + 1] : CopyPiece{}, lines);
  order_streamed_stores();
}

}  // namespace shm

std::string_view streaming_kernel_name() noexcept {
  const std::span<const shm::StreamKernel> kernels = shm::stream_kernels();
  return kernels.empty() ? "memcpy" : kernels.front().name;
}

void shm_copy(std::span<const CopyPiece> pieces, CopyKind kind) noexcept {
  const std::span<const shm::StreamKernel> kernels = shm::stream_kernels();
  if (kind == CopyKind::streaming && !kernels.empty())
    shm::stream_copy(pieces, kernels.front().lines);
  else
    shm::cached_copy(pieces);
}

}  // namespace kvferry
