#include <limits>
#include <random>

#include <fmt/format.h>
#include <sys/random.h>

#include <kvferry/runtime/region_table.hpp>

namespace kvferry {

namespace {

// Keys that peers kept from an engine's former life must not fit a region of this one.
std::uint32_t random_generation() {
  std::uint32_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != sizeof value) value = std::random_device{}();
  return value;
}

// Generation 0 is left out, so that a key that nobody filled in fits nothing.
std::uint32_t after(std::uint32_t generation) {
  return generation == std::numeric_limits<std::uint32_t>::max() ? 1 : generation + 1;
}

std::uint64_t address_of(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

std::string describe(const RegionRecord& record) {
  return fmt::format("'{}' [{:#x}, {:#x})", record.name, address_of(record.data),
                     address_of(record.data) + record.size);
}

}  // namespace

RegionTable::RegionTable()
    : first_generation_(random_generation()), live_(new std::atomic<const RegionRecord*>[max_regions] {}) {}

RegionTable::~RegionTable() = default;

Status RegionTable::check(const RegionRecord& record) const {
  if (record.name.empty() || record.name.size() > 255)
    return {Errc::invalid_argument,
            fmt::format("region name '{}' has {} characters: 1 to 255 are allowed", record.name, record.name.size())};
  if (record.data == nullptr || record.size == 0)
    return {Errc::invalid_argument,
            fmt::format("region '{}' is empty: {} bytes at {:#x}", record.name, record.size, address_of(record.data))};
  if (record.size > std::numeric_limits<std::uint64_t>::max() - address_of(record.data))
    return {Errc::invalid_argument, fmt::format("region '{}': {} bytes at {:#x} go past the end of the address space",
                                                record.name, record.size, address_of(record.data))};
  if (record.access > Access::read_write || record.leasable > Access::read_write)
    return {Errc::invalid_argument, fmt::format("region '{}': {} is no access", record.name,
                                                static_cast<unsigned>(std::max(record.access, record.leasable)))};
  if (auto found = names_.find(record.name); found != names_.end())
    return {Errc::already_exists,
            fmt::format("region {} is registered already{}: unregister it first, or choose another name than for {}",
                        describe(*entries_[found->second].record),
                        entries_[found->second].retired ? " and still being unregistered" : "", describe(record))};
  if (record.lease) return check_leased(record);
  if (const RegionRecord* other = overlapping(record))
    return {Errc::already_exists, fmt::format("region {} overlaps region {}, which is registered already",
                                              describe(record), describe(*other))};
  return {};
}

Status RegionTable::check_leased(const RegionRecord& record) const {
  const RegionKey key = record.lease->region->key;
  if (key.slot < entries_.size() && !entries_[key.slot].retired && entries_[key.slot].record == record.lease->region)
    return {};
  return {Errc::unknown_region,
          fmt::format("region '{}' is not registered (any more): it can not be leased", record.lease->region->name)};
}

const RegionRecord* RegionTable::overlapping(const RegionRecord& record) const {
  // Registered ranges are disjoint: only the nearest on either side can touch this one.
  const auto next = places_.lower_bound({record.kind, record.data});
  if (next != places_.end() && next->first.first == record.kind &&
      address_of(next->first.second) < address_of(record.data) + record.size)
    return entries_[next->second].record.get();
  if (next == places_.begin()) return nullptr;
  const RegionRecord* before = entries_[std::prev(next)->second].record.get();
  return before->kind == record.kind && address_of(before->data) + before->size > address_of(record.data) ? before
                                                                                                          : nullptr;
}

Result<std::shared_ptr<const RegionRecord>> RegionTable::add(std::unique_ptr<RegionRecord> record) {
  if (!record) return {Errc::invalid_argument, "no region was given"};
  const std::lock_guard lock(mutex_);
  if (Status status = check(*record); !status) return status;
  if (free_slots_.empty()) {
    if (entries_.size() == max_regions)
      return {Errc::resource_exhausted, fmt::format("region '{}': this engine holds {} regions, its limit; register "
                                                    "fewer, larger regions",
                                                    record->name, max_regions)};
    free_slots_.push_back(static_cast<std::uint32_t>(entries_.size()));
    entries_.push_back({nullptr, first_generation_, false});
  }
  const std::uint32_t slot = free_slots_.back();
  free_slots_.pop_back();

  Entry& entry = entries_[slot];
  entry.generation = after(entry.generation);
  record->key = {slot, entry.generation};
  entry.record = std::move(record);
  entry.retired = false;
  names_.emplace(entry.record->name, slot);
  if (!entry.record->lease) places_.emplace(Place{entry.record->kind, entry.record->data}, slot);
  live_[slot].store(entry.record.get(), std::memory_order_release);
  version_.fetch_add(1, std::memory_order_acq_rel);
  return entry.record;
}

RegionTable::Entry* RegionTable::entry_of(RegionKey key) {
  if (key.slot >= entries_.size()) return nullptr;
  Entry& entry = entries_[key.slot];
  return entry.record && entry.generation == key.generation ? &entry : nullptr;
}

Status RegionTable::retire(RegionKey key) {
  const std::lock_guard lock(mutex_);
  Entry* entry = entry_of(key);
  if (entry == nullptr || entry->retired)
    return {Errc::unknown_region,
            fmt::format("region {}.{} is not registered, or was unregistered already", key.slot, key.generation)};
  entry->retired = true;
  live_[key.slot].store(nullptr, std::memory_order_release);
  version_.fetch_add(1, std::memory_order_acq_rel);
  return {};
}

void RegionTable::erase(RegionKey key) {
  std::shared_ptr<const RegionRecord> gone;  // unmapping happens outside the lock
  const std::lock_guard lock(mutex_);
  Entry* entry = entry_of(key);
  if (entry == nullptr || !entry->retired) return;
  names_.erase(entry->record->name);
  if (!entry->record->lease) places_.erase({entry->record->kind, entry->record->data});
  gone = std::move(entry->record);
  free_slots_.push_back(key.slot);
}

const RegionRecord* RegionTable::find(RegionKey key) const noexcept {
  if (key.slot >= max_regions) return nullptr;
  const RegionRecord* record = live_[key.slot].load(std::memory_order_acquire);
  return record != nullptr && record->key == key ? record : nullptr;
}

std::shared_ptr<const RegionRecord> RegionTable::find_name(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(name);
  if (found == names_.end() || entries_[found->second].retired) return nullptr;
  return entries_[found->second].record;
}

std::vector<std::shared_ptr<const RegionRecord>> RegionTable::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<const RegionRecord>> records;
  for (const Entry& entry : entries_)
    if (entry.record && !entry.retired) records.push_back(entry.record);
  return records;
}

}  // namespace kvferry
