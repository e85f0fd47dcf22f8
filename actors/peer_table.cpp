#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include <fmt/format.h>
#include <sys/random.h>

#include <kvferry/actors/peer_table.hpp>

namespace kvferry {
namespace {

void fill_random(void* to, std::size_t bytes) {
  if (::getrandom(to, bytes, 0) == static_cast<ssize_t>(bytes)) return;
  std::random_device device;
  auto* out = static_cast<unsigned char*>(to);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<unsigned char>(device());
}

}  // namespace

std::uint64_t random_u64() {
  std::uint64_t value = 0;
  fill_random(&value, sizeof value);
  return value ? value : 1;
}

Token random_token() {
  Token token;
  fill_random(token.data(), token.size());
  return token;
}

// ---------------------------------------------------------------- PeerRecord

void PeerRecord::set_state(PeerState next, Status reason) {
  const std::lock_guard lock(mutex_);
  reason_ = std::move(reason);
  state.store(next, std::memory_order_release);
}

Status PeerRecord::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

std::string PeerRecord::address() const {
  const std::lock_guard lock(mutex_);
  return address_;
}

void PeerRecord::set_address(std::string address) {
  const std::lock_guard lock(mutex_);
  address_ = std::move(address);
}

std::shared_ptr<const Route> PeerRecord::route() const {
  const std::lock_guard lock(mutex_);
  return route_;
}

void PeerRecord::set_route(std::shared_ptr<const Route> route) {
  const std::lock_guard lock(mutex_);
  route_ = std::move(route);
}

std::shared_ptr<const RemoteRegion> PeerRecord::find_region(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(name);
  return found == regions_.end() ? nullptr : found->second;
}

void PeerRecord::set_region(RemoteRegion region) {
  auto shared = std::make_shared<const RemoteRegion>(std::move(region));
  const std::lock_guard lock(mutex_);
  regions_[shared->name] = shared;
}

void PeerRecord::forget_region(const std::string& name, RegionKey key) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(name);
  if (found != regions_.end() && found->second->key == key) regions_.erase(found);
}

bool PeerRecord::accept_notification(std::uint64_t sequence, NotificationQueue& queue, std::uint32_t immediate) {
  // The top byte is the initiator's group: each group numbers its own.
  const std::uint64_t group = sequence >> 56;
  const std::uint64_t number = sequence & ((std::uint64_t{1} << 56) - 1);
  const std::lock_guard lock(mutex_);
  SequenceWindow& window = windows_[group];
  if (window.seen(number)) return true;
  if (!queue.push({name, incarnation, immediate})) return false;
  window.mark(number);
  return true;
}

std::string PeerRecord::describe() const {
  const auto now = state.load(std::memory_order_acquire);
  const auto route_now = route();
  switch (now) {
    case PeerState::inbound:
      return "connected to us, no rails of ours";
    case PeerState::connecting:
      return "connecting";
    case PeerState::up:
      return fmt::format("up over {}", route_now ? route_now->text : "nothing");
    case PeerState::suspect:
      return fmt::format("no rail is up: {}", reason().text());
    case PeerState::lost:
      return fmt::format("lost: {}", reason().text());
    case PeerState::stale:
      return fmt::format("stale: {}", reason().text());
    case PeerState::closed:
      return fmt::format("closed: {}", reason().text());
  }
  return "unknown";
}

Status PeerRecord::refusal() const {
  const auto now = state.load(std::memory_order_acquire);
  if (now == PeerState::inbound)
    return {Errc::no_path, fmt::format("peer '{}' connected to this engine, but this engine has not connected to it: "
                                       "call connect() with its address first",
                                       name)};
  Status why = reason();
  if (!why.is_ok()) return why;
  return {Errc::no_path, fmt::format("peer '{}' has no rail that is up", name)};
}

// ---------------------------------------------------------------- PeerTable

std::size_t PeerTable::TokenHash::operator()(const Token& token) const noexcept {
  std::size_t head = 0;
  std::memcpy(&head, token.data(), sizeof head);
  return head;
}

std::shared_ptr<PeerRecord> PeerTable::find_or_add(const std::string& name, std::uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  auto& record = by_life_[incarnation];
  if (!record) {
    record = std::make_shared<PeerRecord>(next_slot_++, own_, name, incarnation);
    record->next_message.store(first_message_, std::memory_order_relaxed);
    by_slot_[record->slot] = record;
  }
  return record;
}

std::shared_ptr<PeerRecord> PeerTable::find_life(std::uint64_t incarnation) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_life_.find(incarnation);
  return found == by_life_.end() ? nullptr : found->second;
}

std::shared_ptr<PeerRecord> PeerTable::find_slot(std::uint32_t slot) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_slot_.find(slot);
  return found == by_slot_.end() ? nullptr : found->second;
}

Token PeerTable::open_session(const std::shared_ptr<PeerRecord>& peer, TimePoint now) {
  Token token;
  {
    const std::lock_guard lock(mutex_);
    const auto [place, fresh] = sessions_.try_emplace(peer->incarnation);
    Session& session = place->second;
    if (fresh) session = {peer, random_token(), now, next_order_++};
    session.seen = now;
    token = session.token;
    tokens_[token] = peer->slot;
  }
  changed_.notify_all();
  return token;
}

bool PeerTable::touch_session(std::uint64_t incarnation, TimePoint now) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(incarnation);
  if (found == sessions_.end()) return false;
  found->second.seen = now;
  return true;
}

bool PeerTable::close_session(std::uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(incarnation);
  if (found == sessions_.end()) return false;
  tokens_.erase(found->second.token);
  sessions_.erase(found);
  return true;
}

std::vector<std::shared_ptr<PeerRecord>> PeerTable::silent_sessions(TimePoint limit) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<PeerRecord>> silent;
  for (const auto& [life, session] : sessions_)
    if (session.seen < limit) silent.push_back(session.peer);
  return silent;
}

std::optional<SessionId> PeerTable::authorize(const Token& token) const {
  const std::lock_guard lock(mutex_);
  const auto found = tokens_.find(token);
  if (found == tokens_.end()) return std::nullopt;
  return found->second;
}

std::shared_ptr<PeerRecord> PeerTable::wait_for_session(const std::string& name, Duration limit) const {
  std::unique_lock lock(mutex_);
  std::shared_ptr<PeerRecord> newest;
  changed_.wait_for(lock, std::min<Duration>(limit, longest_wait), [&] {
    std::uint64_t order = 0;
    for (const auto& [life, session] : sessions_)
      if (session.peer->name == name && session.order > order) newest = session.peer, order = session.order;
    return closed_ || newest;
  });
  return newest;
}

std::vector<std::shared_ptr<PeerRecord>> PeerTable::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<PeerRecord>> records;
  records.reserve(by_slot_.size());
  for (const auto& [slot, record] : by_slot_) records.push_back(record);
  return records;
}

void PeerTable::remove(std::uint32_t slot) {
  const std::lock_guard lock(mutex_);
  const auto found = by_slot_.find(slot);
  if (found == by_slot_.end()) return;
  const std::uint64_t life = found->second->incarnation;
  if (sessions_.contains(life)) return;
  first_message_ = std::max(first_message_, found->second->next_message.load(std::memory_order_relaxed));
  by_life_.erase(life);
  by_slot_.erase(found);
}

void PeerTable::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

}  // namespace kvferry
