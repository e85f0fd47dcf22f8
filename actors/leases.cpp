#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/prctl.h>

#include <kvferry/actors/leases.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

constexpr Duration longest_sleep = std::chrono::seconds(10);
constexpr Duration shortest_sleep = std::chrono::milliseconds(1);  // CAF does not bear a wait of 0

}  // namespace

LeaseActor::LeaseActor(caf::actor_config& config, std::function<void(RegionKey)> end_lease)
    : caf::blocking_actor(config), end_lease_(std::move(end_lease)) {}

void LeaseActor::act() {
  ::prctl(PR_SET_NAME, "kvferry-leases");
  std::multimap<TimePoint, RegionKey> ends;
  bool running = true;
  while (running) {
    const Duration left = ends.empty() ? longest_sleep : ends.begin()->first - Clock::now();
    receive([&](const WatchLease& watch) { ends.emplace(watch.end, watch.lease); },
            [&](StopLeases) { running = false; },
            caf::others >> [](caf::message_view&) -> caf::result<caf::message> { return caf::sec::unexpected_message; },
            caf::after(std::clamp(left, shortest_sleep, longest_sleep)) >> [] {});
    while (running && !ends.empty() && ends.begin()->first <= Clock::now()) {
      end_lease_(ends.begin()->second);
      ends.erase(ends.begin());
    }
  }
}

void Leases::start(caf::actor_system& system) {
  actor_ = system.spawn<LeaseActor, caf::detached>([this](RegionKey lease) {
    if (Status status = end(lease); !status) log(LogLevel::error, status.with_context("ending a lease").to_string());
  });
}

void Leases::stop(caf::scoped_actor& self) {
  if (!actor_) return;
  caf::anon_send(actor_, StopLeases{});
  self->wait_for(actor_);
  const std::lock_guard lock(mutex_);
  actor_ = nullptr;
}

void Leases::add(std::shared_ptr<const RegionRecord> lease) {
  const RegionKey key = lease->key;
  const TimePoint end = lease->lease->end;
  const std::lock_guard lock(mutex_);
  auto entry = std::make_shared<Entry>();
  entry->lease = std::move(lease);
  entries_.emplace(number_of(key), std::move(entry));
  if (actor_) caf::anon_send(actor_, WatchLease{key, end});
}

Status Leases::end(RegionKey lease) {
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(number_of(lease));
    if (found == entries_.end()) return {};
    entry = found->second;
  }
  const std::lock_guard ending(entry->ending);
  if (entry->ended) return {};
  // Retired already only if an earlier attempt could not make it quiet: then this one goes on from there.
  static_cast<void>(regions_.retire(lease));
  if (Status status = release_(*entry->lease); !status) return status;
  entry->ended = true;
  const std::lock_guard lock(mutex_);
  entries_.erase(number_of(lease));
  return {};
}

Status Leases::end_all_of(const RegionRecord& region) {
  std::vector<RegionKey> leases;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, entry] : entries_)
      if (entry->lease->lease->region.get() == &region) leases.push_back(entry->lease->key);
  }
  for (const RegionKey lease : leases)
    if (Status status = end(lease); !status) return status;
  return {};
}

}  // namespace kvferry
