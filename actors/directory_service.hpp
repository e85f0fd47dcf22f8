// What a directory answers. No sockets, no threads: bytes and the time in, bytes out. Internal.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kvferry/actors/directory_messages.hpp>

namespace kvferry {

/// A message for one client: `routing` is ZeroMQ's name of its connection.
struct DirectoryOutput {
  std::string routing;
  std::string bytes;
};

class DirectoryService {
 public:
  static constexpr std::size_t max_entries = 65536;
  static constexpr std::size_t max_watchers = 1024;

  explicit DirectoryService(std::uint64_t instance) : instance_(instance) {}

  /// Answers one message; appends what is to be sent. Never throws for what a client sent.
  void receive(const std::string& routing, std::span<const std::byte> bytes, TimePoint now,
               std::vector<DirectoryOutput>& output);
  /// Drops what is over its time and answers who waits for changes.
  void tick(TimePoint now, std::vector<DirectoryOutput>& output);
  /// When tick has something to do at the latest.
  TimePoint next_tick() const;

  std::size_t size() const noexcept { return entries_.size(); }

 private:
  struct Entry {
    DirectoryEntry entry;
    DirectoryKey key;
    TimePoint end;
  };
  using Entries = std::map<std::string, Entry>;
  struct Watcher {
    std::string routing;
    std::uint64_t id = 0;
    ListRequest request;
    TimePoint until;
  };

  DirectoryBody answer(const PublishRequest& request, TimePoint now);
  DirectoryBody answer(const WithdrawRequest& request);
  DirectoryBody answer(const FindRequest& request) const;
  ListAnswer answer(const ListRequest& request) const;
  std::uint64_t last_change(const std::string& role) const;
  bool unchanged(const ListRequest& request) const;
  void watch(const std::string& routing, std::uint64_t id, const ListRequest& request, TimePoint now,
             std::vector<DirectoryOutput>& output);
  void note_change(const std::string& role);
  void erase(Entries::iterator place);

  const std::uint64_t instance_;
  std::uint64_t version_ = 1;
  std::unordered_map<std::string, std::uint64_t> changed_;  ///< version of each role's last change
  std::uint64_t others_changed_ = 0;                        ///< of the roles that did not fit there
  Entries entries_;
  std::set<std::pair<TimePoint, std::string>> ends_;
  std::list<Watcher> watchers_;
  std::uint64_t answered_version_ = 1;  ///< up to which change watchers have been looked at
};

}  // namespace kvferry
