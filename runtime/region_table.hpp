// All regions of one engine: registration under a lock, lookup by key without one.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

class RegionTable {
 public:
  static constexpr std::uint32_t max_regions = 16384;

  RegionTable();
  ~RegionTable();
  RegionTable(const RegionTable&) = delete;
  RegionTable& operator=(const RegionTable&) = delete;

  /// Adds a record and gives it its key. Refuses a name in use, a range that overlaps another
  /// region of the same memory kind, an empty range, and more than max_regions. A lease lies over its
  /// region, which must not be retired. Any thread.
  Result<std::shared_ptr<const RegionRecord>> add(std::unique_ptr<RegionRecord> record);

  /// Hides the region from all look-ups from now on; the record stays allocated, its name and range
  /// stay taken, until erase(). Any thread.
  Status retire(RegionKey key);

  /// Forgets a retired region. Call once no thread that used find() can hold it any more.
  void erase(RegionKey key);

  /// The record, or nullptr when unknown or retired. Valid until the caller's thread has agreed
  /// (through the release protocol of its poller) that the region may go. Lock-free, any thread.
  const RegionRecord* find(RegionKey key) const noexcept;

  std::shared_ptr<const RegionRecord> find_name(const std::string& name) const;
  std::vector<std::shared_ptr<const RegionRecord>> all() const;
  /// Rises with every add and retire.
  std::uint64_t version() const noexcept { return version_.load(std::memory_order_acquire); }

 private:
  struct Entry {
    std::shared_ptr<const RegionRecord> record;
    std::uint32_t generation = 0;
    bool retired = false;
  };

  using Place = std::pair<MemoryKind, const std::byte*>;

  Status check(const RegionRecord& record) const;
  Status check_leased(const RegionRecord& record) const;
  const RegionRecord* overlapping(const RegionRecord& record) const;
  /// The entry that `key` names, or nullptr.
  Entry* entry_of(RegionKey key);

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::map<std::string, std::uint32_t, std::less<>> names_;  ///< name → slot
  std::map<Place, std::uint32_t> places_;                    ///< kind and first byte → slot
  std::uint32_t first_generation_;
  std::vector<std::uint32_t> free_slots_;
  std::unique_ptr<std::atomic<const RegionRecord*>[]> live_;
  std::atomic<std::uint64_t> version_{0};
};

}  // namespace kvferry
