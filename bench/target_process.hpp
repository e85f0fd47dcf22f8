// The other process of --mode both: the same program as a target.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include <kvferry/runtime/status.hpp>

namespace kvferry::bench {

/// Line by which a target tells its address on standard output.
inline constexpr const char* address_prefix = "transfer_bench target at ";

/// A child process that ends with this object, or with this process if that dies first.
class TargetProcess {
 public:
  /// Starts this program with `arguments` and waits, 15 s at most, until it has told its address.
  static Result<TargetProcess> start(const std::vector<std::string>& arguments);

  TargetProcess(TargetProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), address_(std::move(other.address_)) {}
  TargetProcess& operator=(TargetProcess&&) = delete;
  /// Asks it to end, kills it after 2 s, and reaps it.
  ~TargetProcess();

  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }

 private:
  explicit TargetProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace kvferry::bench
