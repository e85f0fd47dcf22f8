// The directory: engines publish their names and addresses there for a time, and others find them.
//
// A directory keeps nothing on disk: every heartbeat of a client carries its whole entry, so one that was restarted
// knows everything again after one heartbeat. Several directories do not know of each other: a client publishes to all
// that it is given and asks all, and any one that answers suffices. Transfers never depend on a directory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

/// One engine, as the directory knows it.
struct DirectoryEntry {
  std::string name;               ///< 1-255 characters, unique
  std::string address;            ///< for Engine::connect; 1-512 characters
  std::string role;               ///< what it is looked for as, such as "decode"; at most 64 characters
  std::string metadata;           ///< anything, at most 1024 bytes
  std::uint64_t incarnation = 0;  ///< the engine's

  friend bool operator==(const DirectoryEntry&, const DirectoryEntry&) = default;
};

/// All entries of a role, and where to go on watching.
struct DirectoryListing {
  std::vector<DirectoryEntry> entries;  ///< by name
  // Which state of which directory this is, for watch(). A listing that is not from a directory has instance 0.
  std::uint32_t directory = 0;
  std::uint64_t instance = 0;
  std::uint64_t version = 0;
};

struct DirectoryClientConfig {
  std::vector<std::string> directories = {};  ///< tcp://HOST:PORT, at least one, at most 16
  std::chrono::milliseconds time{
      15000};  ///< how long an entry lives without a heartbeat, 300 ms - 10 min; a third of it apart
  std::chrono::milliseconds limit{1000};  ///< how long one question waits for an answer, 10 ms - 60 s
};

/// Publishes and asks. Thread-safe; has one thread, which beats for what is published. Errors are returned.
class DirectoryClient {
 public:
  /// Errors: invalid_argument (a field is out of range). Connects later: the directories need not be up yet.
  static Result<DirectoryClient> start(DirectoryClientConfig config);
  DirectoryClient(DirectoryClient&&) noexcept;
  DirectoryClient& operator=(DirectoryClient&&) noexcept;
  /// Withdraws what is published, for at most `limit`.
  ~DirectoryClient();

  /// Publishes the entry, or what has changed of it, and from then on keeps it published, even if this call fails.
  /// Ok when one directory has it. Errors: access_denied (the name is another's), invalid_argument, unreachable (no
  /// directory answers), resource_exhausted.
  Status publish(const DirectoryEntry& entry);
  /// Takes it back at once, and beats for it no more. Errors: unreachable (it then goes by itself).
  Status withdraw(const std::string& name);

  /// Errors: unreachable, when nobody has that name, or no directory answers; the text says which.
  Result<DirectoryEntry> find(const std::string& name);
  /// Everything with that role, or everything at all if it is empty. Errors: unreachable (no directory answers).
  Result<DirectoryListing> list(const std::string& role);
  /// The entries of one directory, once it is in another state than `before`, or after `limit`; at once for a listing
  /// that list() gave or nobody. Errors: unreachable (no directory answers).
  Result<DirectoryListing> watch(const std::string& role, const DirectoryListing& before, Duration limit);

 private:
  class Impl;
  explicit DirectoryClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A directory, in a thread of this process; the program kvferry-directory is one around it.
class DirectoryServer {
 public:
  /// Listens on tcp://HOST:PORT; port 0 takes a free one. Errors: address_in_use, invalid_argument, unreachable.
  static Result<DirectoryServer> start(const std::string& listen);
  DirectoryServer(DirectoryServer&&) noexcept;
  DirectoryServer& operator=(DirectoryServer&&) noexcept;
  ~DirectoryServer();
  const std::string& address() const;  ///< with the real port

 private:
  class Impl;
  explicit DirectoryServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
