// What clients and directories say to each other: MessagePack maps, one per ZeroMQ message. Internal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <kvferry/actors/directory.hpp>

namespace kvferry {

inline constexpr std::uint32_t directory_schema_version = 1;
inline constexpr std::size_t max_directory_request = 4096;     ///< bytes
inline constexpr std::size_t max_directory_answer = 4u << 20;  ///< bytes
inline constexpr std::uint32_t max_entries_at_once = 1024;     ///< in one answer
inline constexpr std::uint32_t max_watch_ms = 60000;
inline constexpr std::uint32_t least_entry_ms = 300;
inline constexpr std::uint32_t most_entry_ms = 600000;

/// Whoever has the key of an entry may change it.
using DirectoryKey = std::array<std::byte, 16>;

struct PublishRequest {
  DirectoryEntry entry;
  DirectoryKey key{};
  std::uint32_t ms = 0;  ///< how long it lives from now on
};
struct WithdrawRequest {
  std::string name;
  DirectoryKey key{};
};
struct FindRequest {
  std::string name;
};
/// Entries of a role whose names come after `after`; with a time above 0 only once the state is another one.
struct ListRequest {
  std::string role;
  std::string after;
  std::uint64_t instance = 0;
  std::uint64_t version = 0;
  std::uint32_t ms = 0;
};
struct DoneAnswer {};
struct EntryAnswer {
  DirectoryEntry entry;
};
struct ListAnswer {
  std::uint64_t instance = 0;  ///< random, new at every start of the directory
  std::uint64_t version = 0;
  std::uint64_t changed = 0;  ///< version of the last change that concerns the question
  bool more = false;          ///< there are entries after the last of these
  std::vector<DirectoryEntry> entries;
};
struct RefusedAnswer {
  std::uint32_t code = 0;  ///< Errc
  std::string text;
};

using DirectoryBody = std::variant<PublishRequest, WithdrawRequest, FindRequest, ListRequest, DoneAnswer, EntryAnswer,
                                   ListAnswer, RefusedAnswer>;

struct DirectoryMessage {
  std::uint64_t id = 0;  ///< pairs an answer with its question
  DirectoryBody body;
};

/// invalid_argument, naming the field, when a length is out of range.
Status check_entry(const DirectoryEntry& entry);

std::string encode(const DirectoryMessage& message);
/// Errors: malformed, version_mismatch.
Result<DirectoryMessage> decode_directory_message(std::span<const std::byte> bytes);

}  // namespace kvferry
