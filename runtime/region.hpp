// Registered memory: what the owner keeps, what a peer knows of it, and the handle users hold.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvferry/runtime/range_set.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

enum class MemoryKind : std::uint8_t { host = 0, cuda = 1 };

/// What peers may do with a region.
enum class Access : std::uint8_t { none = 0, read = 1, write = 2, read_write = 3 };

constexpr bool allows(Access have, Access need) noexcept {
  return (static_cast<unsigned>(have) & static_cast<unsigned>(need)) == static_cast<unsigned>(need);
}

/// Names one registration for ever: a slot is used again, its generation is not.
struct RegionKey {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;

  friend bool operator==(const RegionKey&, const RegionKey&) = default;
};

struct RegionRecord;

/// What makes a region a lease: memory of another region that one peer may use, in part and for a time.
/// Whoever serves peers checks it beside the region's access.
struct LeaseTerms {
  std::shared_ptr<const RegionRecord> region;  ///< whose memory it is
  std::uint64_t holder = 0;                    ///< session of the one peer that may use it
  RangeSet ranges;                             ///< what it may use, in bytes from the start of `region`
  std::chrono::steady_clock::time_point end;

  /// Whether that session may use the lease at that moment. Errors: access_denied.
  Status check(std::uint64_t session, std::chrono::steady_clock::time_point now) const;
};

/// The owner's record of a region. Immutable once registered, shared by all threads.
struct RegionRecord {
  RegionKey key;
  std::string name;
  std::byte* data = nullptr;
  std::uint64_t size = 0;  ///< bytes
  MemoryKind kind = MemoryKind::host;
  Access access = Access::read_write;
  Access leasable = Access::none;  ///< what leases of it may allow
  /// A memfd that holds exactly this region's bytes (offset 0 = data), or -1 for foreign memory.
  int memfd = -1;
  /// GPU memory: its dma-buf handle as whoever allocated it exports it (cuMemGetHandleForAddressRange), or -1. It
  /// stays the allocator's and must stay open while the region is registered. Host memory has none.
  int dmabuf_fd = -1;
  std::uint64_t dmabuf_offset = 0;  ///< of `data` in it
  /// Only of a lease. Its memory and memfd are those of another region.
  std::unique_ptr<const LeaseTerms> lease;

  RegionRecord() = default;
  RegionRecord(const RegionRecord&) = delete;
  RegionRecord& operator=(const RegionRecord&) = delete;
  /// Unmaps and closes what the engine allocated; foreign memory is left alone.
  ~RegionRecord();
};

/// Zeroed, page-aligned memory in a memfd of its own that processes of this host can map; pages are
/// taken on first touch. The size is sealed, so no peer can shrink it under our feet. Fails with
/// resource_exhausted (the text names the limit that was hit) or invalid_argument.
Result<std::unique_ptr<RegionRecord>> allocate_region(std::string name, std::uint64_t bytes, Access access);

/// What an initiator knows of a peer's region.
struct RemoteRegion {
  RegionKey key;
  std::string name;
  std::uint64_t size = 0;  ///< bytes
  MemoryKind kind = MemoryKind::host;
  Access access = Access::none;
  /// Transport name → the bytes that transport gave out at registration (may be empty).
  std::vector<std::pair<std::string, std::string>> descriptors;
  /// What of it may be used, when it is a lease; else empty.
  std::shared_ptr<const RangeSet> lease;
};

/// A user's handle of registered local memory; cheap to copy. The memory of allocate() lives until
/// it is unregistered or its engine ends, and until the last handle is gone.
class Region {
 public:
  Region() = default;
  explicit Region(std::shared_ptr<const RegionRecord> record) : record_(std::move(record)) {}

  explicit operator bool() const noexcept { return record_ != nullptr; }
  const std::string& name() const { return record_->name; }
  std::byte* data() const { return record_->data; }
  std::uint64_t size() const { return record_->size; }
  std::span<std::byte> bytes() const { return {record_->data, record_->size}; }
  const std::shared_ptr<const RegionRecord>& record() const { return record_; }

 private:
  std::shared_ptr<const RegionRecord> record_;
};

}  // namespace kvferry
