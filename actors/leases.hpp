// The leases that an engine has given: ends them on demand, and when their time is over.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <kvferry/actors/caf.hpp>
#include <kvferry/runtime/region_table.hpp>

namespace kvferry {

/// Sleeps until the next lease ends. A thread of its own, because ending one waits for the peer's writes.
class LeaseActor final : public caf::blocking_actor {
 public:
  LeaseActor(caf::actor_config& config, std::function<void(RegionKey)> end_lease);
  void act() override;

 private:
  std::function<void(RegionKey)> end_lease_;
};

/// All leases of one engine. Thread-safe.
class Leases {
 public:
  /// `release` makes a retired region quiet and forgets it, as for any region.
  Leases(RegionTable& regions, std::function<Status(const RegionRecord&)> release)
      : regions_(regions), release_(std::move(release)) {}

  void start(caf::actor_system& system);
  /// Returns once no lease is being ended by its time any more. The leases themselves stay.
  void stop(caf::scoped_actor& self);

  void add(std::shared_ptr<const RegionRecord> lease);
  /// Returns once nothing of the lease can touch its region any more; ok at once when it has ended before.
  Status end(RegionKey lease);
  /// The same for every lease of a region.
  Status end_all_of(const RegionRecord& region);

 private:
  struct Entry {
    std::mutex ending;  ///< held while the lease is made quiet: whoever ends it too waits
    bool ended = false;
    std::shared_ptr<const RegionRecord> lease;
  };
  using Number = std::pair<std::uint32_t, std::uint32_t>;
  static Number number_of(RegionKey key) { return {key.slot, key.generation}; }

  RegionTable& regions_;
  const std::function<Status(const RegionRecord&)> release_;
  std::mutex mutex_;
  std::map<Number, std::shared_ptr<Entry>> entries_;
  caf::actor actor_;
};

}  // namespace kvferry
