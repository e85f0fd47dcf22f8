// A client's connections to its directories. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <kvferry/actors/directory_messages.hpp>

namespace kvferry {

/// Asks all directories at once. Used by one thread at a time.
class DirectoryLines {
 public:
  explicit DirectoryLines(std::vector<std::string> addresses);
  ~DirectoryLines();

  std::size_t size() const noexcept { return addresses_.size(); }
  /// Sends every question to the directories [first, first + count), and hands each answer over, with the number of the
  /// directory and of the question, until `enough` says true, all have answered, or `limit` is over.
  using Enough = std::function<bool(std::size_t directory, std::size_t question, DirectoryBody answer)>;
  void ask(std::size_t first, std::size_t count, const std::vector<DirectoryBody>& questions, Duration limit,
           const Enough& enough);
  /// Closes the connections: the next question opens them again. A directory keeps memory for each.
  void close();

 private:
  struct Sockets;
  std::vector<std::string> addresses_;
  std::unique_ptr<Sockets> sockets_;
  std::uint64_t next_id_ = 1;
};

}  // namespace kvferry
