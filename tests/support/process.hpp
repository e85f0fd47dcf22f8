// A child process on a leash: one line in, one line out, any signal, and always an end.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace kvferry::test {

class Process {
 public:
  using Duration = std::chrono::steady_clock::duration;

  /// Runs `program` with this process's environment and `variables` ("NAME=value") on top. Throws
  /// std::system_error.
  explicit Process(const std::string& program, const std::vector<std::string>& variables = {});
  /// Kills it if it still runs.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t id() const { return pid_; }
  /// False when it can not take the line any more.
  bool write_line(std::string_view line);
  /// Its next line without the end; nothing after `limit` or when it has closed its output.
  std::optional<std::string> read_line(Duration limit);
  void signal(int number) const;
  /// Its wait status once it has ended; nothing while it runs longer than `limit`.
  std::optional<int> wait(Duration limit);

  /// A number from /proc/PID/status, in its unit there (kB), such as "VmRSS".
  long status_value(std::string_view field) const;
  /// How many descriptors it has open.
  int open_descriptors() const;

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::string unread_;
  std::optional<int> ended_;
};

/// The same for this process.
long own_status_value(std::string_view field);
int own_open_descriptors();

}  // namespace kvferry::test
