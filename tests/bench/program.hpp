// Runs a program as a user would, with a limit on its time, and keeps what it said.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <sys/types.h>

namespace kvferry::test {

struct Outcome {
  int exit_code = -1;  ///< 128 + signal when killed
  std::string output;
  std::string errors;
  std::chrono::duration<double> taken{};
};

/// A running program. Killed and reaped with this object.
class Program {
 public:
  explicit Program(const std::vector<std::string>& words);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program();

  pid_t pid() const { return pid_; }
  /// Everything written to standard output up to and with the first line that begins so; empty when it
  /// does not come within `limit`.
  std::string wait_for_line(const std::string& prefix, std::chrono::seconds limit);
  void signal(int number) const;
  /// Waits for the end; kills at `limit`.
  Outcome finish(std::chrono::seconds limit);
  /// Processes that this one has started and that still run.
  std::vector<pid_t> children() const;

 private:
  void read_available(int wait_ms);

  std::chrono::steady_clock::time_point begin_;
  pid_t pid_ = -1;
  int output_ = -1;
  int errors_ = -1;
  Outcome outcome_;
};

Outcome run(const std::vector<std::string>& words, std::chrono::seconds limit = std::chrono::seconds(60));

bool is_running(pid_t pid);

}  // namespace kvferry::test
