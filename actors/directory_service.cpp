#include <algorithm>

#include <fmt/format.h>

#include <kvferry/actors/directory_service.hpp>

namespace kvferry {
namespace {

/// Roles are made by clients, so their number is bounded: those beyond share one version.
constexpr std::size_t max_roles = 4096;

RefusedAnswer refused(Errc code, std::string text) { return {static_cast<std::uint32_t>(code), std::move(text)}; }

}  // namespace

void DirectoryService::receive(const std::string& routing, std::span<const std::byte> bytes, TimePoint now,
                               std::vector<DirectoryOutput>& output) {
  if (bytes.size() > max_directory_request) return;
  const auto message = decode_directory_message(bytes);
  if (!message) {
    // Another version can still be told why; noise gets no answer.
    if (message.status() == Errc::version_mismatch)
      output.push_back({routing, encode(DirectoryMessage{
                                     0, refused(Errc::version_mismatch, std::string(message.status().text()))})});
    return;
  }
  const std::uint64_t id = message->id;
  tick(now, output);  // nobody is told of an entry whose time is over
  if (const auto* publish = std::get_if<PublishRequest>(&message->body))
    output.push_back({routing, encode(DirectoryMessage{id, answer(*publish, now)})});
  else if (const auto* withdraw = std::get_if<WithdrawRequest>(&message->body))
    output.push_back({routing, encode(DirectoryMessage{id, answer(*withdraw)})});
  else if (const auto* find = std::get_if<FindRequest>(&message->body))
    output.push_back({routing, encode(DirectoryMessage{id, answer(*find)})});
  else if (const auto* list = std::get_if<ListRequest>(&message->body))
    watch(routing, id, *list, now, output);
  tick(now, output);
}

DirectoryBody DirectoryService::answer(const PublishRequest& request, TimePoint now) {
  const DirectoryEntry& wanted = request.entry;
  if (Status status = check_entry(wanted); !status) return refused(status.code(), std::string(status.text()));
  if (request.ms < least_entry_ms || request.ms > most_entry_ms)
    return refused(Errc::invalid_argument, fmt::format("an entry may live for {} to {} ms, not for {}", least_entry_ms,
                                                       most_entry_ms, request.ms));
  const TimePoint end = now + std::chrono::milliseconds(request.ms);
  const auto place = entries_.find(wanted.name);
  if (place == entries_.end()) {
    if (entries_.size() >= max_entries)
      return refused(Errc::resource_exhausted, fmt::format("the directory holds {} entries, its limit", max_entries));
    entries_.emplace(wanted.name, Entry{wanted, request.key, end});
    ends_.emplace(end, wanted.name);
    note_change(wanted.role);
    return DoneAnswer{};
  }
  Entry& entry = place->second;
  if (entry.key != request.key)
    return refused(Errc::access_denied,
                   fmt::format("the name '{}' is published by another engine, at {}; choose another "
                               "name, or wait until that entry is over",
                               wanted.name, entry.entry.address));
  if (!(entry.entry == wanted)) {
    note_change(entry.entry.role);
    note_change(wanted.role);
    entry.entry = wanted;
  }
  ends_.erase({entry.end, wanted.name});
  entry.end = end;
  ends_.emplace(end, wanted.name);
  return DoneAnswer{};
}

DirectoryBody DirectoryService::answer(const WithdrawRequest& request) {
  const auto place = entries_.find(request.name);
  if (place == entries_.end()) return DoneAnswer{};
  if (place->second.key != request.key)
    return refused(Errc::access_denied, fmt::format("the name '{}' is published by another engine", request.name));
  erase(place);
  return DoneAnswer{};
}

DirectoryBody DirectoryService::answer(const FindRequest& request) const {
  const auto place = entries_.find(request.name);
  if (place == entries_.end())
    return refused(Errc::unreachable, fmt::format("no engine named '{}' is published", request.name));
  return EntryAnswer{place->second.entry};
}

ListAnswer DirectoryService::answer(const ListRequest& request) const {
  ListAnswer answer;
  answer.instance = instance_;
  answer.version = version_;
  answer.changed = last_change(request.role);
  for (auto place = entries_.upper_bound(request.after); place != entries_.end(); ++place) {
    if (!request.role.empty() && place->second.entry.role != request.role) continue;
    answer.more = answer.entries.size() == max_entries_at_once;
    if (answer.more) break;
    answer.entries.push_back(place->second.entry);
  }
  return answer;
}

bool DirectoryService::unchanged(const ListRequest& request) const {
  if (request.instance != instance_) return false;
  return request.version >= last_change(request.role);
}

std::uint64_t DirectoryService::last_change(const std::string& role) const {
  if (role.empty()) return version_;
  const auto changed = changed_.find(role);
  return changed == changed_.end() ? others_changed_ : changed->second;
}

void DirectoryService::watch(const std::string& routing, std::uint64_t id, const ListRequest& request, TimePoint now,
                             std::vector<DirectoryOutput>& output) {
  if (request.ms == 0 || !request.after.empty() || !unchanged(request)) {
    output.push_back({routing, encode(DirectoryMessage{id, answer(request)})});
    return;
  }
  // The longest waiting one gives way: it gets its answer now, and may ask again.
  if (watchers_.size() >= max_watchers) {
    const Watcher& oldest = watchers_.front();
    output.push_back({oldest.routing, encode(DirectoryMessage{oldest.id, answer(oldest.request)})});
    watchers_.pop_front();
  }
  watchers_.push_back({routing, id, request, now + std::chrono::milliseconds(std::min(request.ms, max_watch_ms))});
}

void DirectoryService::tick(TimePoint now, std::vector<DirectoryOutput>& output) {
  while (!ends_.empty() && ends_.begin()->first <= now) erase(entries_.find(ends_.begin()->second));
  const bool news = answered_version_ != version_;
  answered_version_ = version_;
  std::erase_if(watchers_, [&](const Watcher& watcher) {
    if (now < watcher.until && (!news || unchanged(watcher.request))) return false;
    output.push_back({watcher.routing, encode(DirectoryMessage{watcher.id, answer(watcher.request)})});
    return true;
  });
}

TimePoint DirectoryService::next_tick() const {
  TimePoint next = ends_.empty() ? TimePoint::max() : ends_.begin()->first;
  for (const Watcher& watcher : watchers_) next = std::min(next, watcher.until);
  return next;
}

void DirectoryService::note_change(const std::string& role) {
  ++version_;
  if (changed_.size() >= max_roles && !changed_.contains(role)) {
    others_changed_ = version_;
    return;
  }
  changed_[role] = version_;
}

void DirectoryService::erase(Entries::iterator place) {
  ends_.erase({place->second.end, place->first});
  note_change(place->second.entry.role);
  entries_.erase(place);
}

}  // namespace kvferry
