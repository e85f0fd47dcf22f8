#include "tests/support/nic_timer.hpp"

#include <algorithm>

namespace kvferry::test {
namespace {

constexpr std::uint64_t ps_per_second = 1'000'000'000'000;

}  // namespace

NicTimer::NicTimer(const NicSpeed& speed, std::size_t devices) : speed_(speed), devices_(devices) {}

void NicTimer::post(std::uint32_t number, std::size_t device, std::size_t peer, std::uint64_t bytes, bool read,
                    std::uint32_t reads_out) {
  const auto [place, fresh] = pairs_.try_emplace(number);
  Pair& pair = place->second;
  if (fresh) {
    pair.device = device;
    devices_[device].pairs.push_back(&pair);
  }
  pair.waiting.push_back({now_, peer, bytes, read, std::max(reads_out, 1u)});
}

void NicTimer::forget(std::uint32_t number) {
  const auto found = pairs_.find(number);
  if (found == pairs_.end()) return;
  std::erase(devices_[found->second.device].pairs, &found->second);
  pairs_.erase(found);
}

void NicTimer::advance(Picoseconds by) {
  now_ += by;
  for (Device& device : devices_) {
    Picoseconds at = 0;
    while (Pair* pair = next_to_start(device, at)) {
      if (at > now_) break;
      start(device, *pair, at);
    }
  }
}

NicTimer::Picoseconds NicTimer::start_of(const Pair& pair) const {
  const Waiting& next = pair.waiting.front();
  const Device& ours = devices_[pair.device];
  const Device& theirs = devices_[next.peer];
  Picoseconds at = std::max(next.posted, ours.operation_free);
  at = std::max(at, next.read ? std::max(ours.in_free, theirs.out_free) : std::max(ours.out_free, theirs.in_free));
  // The oldest outstanding read must have ended before one more than allowed may start.
  if (next.read && pair.reads.size() >= next.reads_out)
    at = std::max(at, pair.reads[pair.reads.size() - next.reads_out]);
  return at;
}

NicTimer::Pair* NicTimer::next_to_start(const Device& device, Picoseconds& at) const {
  Pair* best = nullptr;
  for (Pair* pair : device.pairs) {
    if (pair->waiting.empty()) continue;
    const Picoseconds start = start_of(*pair);
    if (best != nullptr && (start > at || (start == at && pair->last_turn > best->last_turn))) continue;
    best = pair;
    at = start;
  }
  return best;
}

void NicTimer::start(Device& device, Pair& pair, Picoseconds at) {
  const Waiting next = pair.waiting.front();
  pair.waiting.pop_front();
  pair.last_turn = ++turn_;
  const Picoseconds operation = ps_per_second / speed_.operations;
  const Picoseconds transmission = next.bytes * 8 * 1000 / speed_.gbit;
  device.operation_free = at + operation;
  Device& theirs = devices_[next.peer];
  (next.read ? device.in_free : device.out_free) = at + transmission;
  (next.read ? theirs.out_free : theirs.in_free) = at + transmission;
  const Picoseconds end = at + std::max(operation, transmission) + speed_.round_trip_ns * 1000;
  // Requests of a pair complete in their order.
  pair.due.push_back(pair.due.empty() ? end : std::max(end, pair.due.back()));
  if (!next.read) return;
  pair.reads.push_back(end);
  if (pair.reads.size() > next.reads_out) pair.reads.pop_front();
}

bool NicTimer::front_is_due(std::uint32_t number) const {
  const auto found = pairs_.find(number);
  return found != pairs_.end() && !found->second.due.empty() && found->second.due.front() <= now_;
}

void NicTimer::pop(std::uint32_t number) {
  const auto found = pairs_.find(number);
  if (found == pairs_.end() || found->second.due.empty()) return;
  found->second.due.pop_front();
  found->second.unanswered_since.reset();
}

bool NicTimer::gives_up(std::uint32_t number) {
  const auto found = pairs_.find(number);
  if (found == pairs_.end()) return true;
  std::optional<Picoseconds>& since = found->second.unanswered_since;
  if (!since) since = now_;
  return now_ - *since >= speed_.retry_ns * speed_.tries * 1000;
}

}  // namespace kvferry::test
