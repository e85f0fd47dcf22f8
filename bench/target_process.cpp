#include "bench/target_process.hpp"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <thread>

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/file_descriptor.hpp"

namespace kvferry::bench {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr const char* own_program = "/proc/self/exe";
constexpr auto start_limit = 15s;

Status failed(std::string_view what) {
  return {Errc::resource_exhausted, fmt::format("starting the target process: {}: {}", what, std::strerror(errno))};
}

/// Runs in the child between fork and exec. The parent has one thread as yet, so any call is safe.
[[noreturn]] void become_target(char* const* arguments, int output, pid_t parent) {
  // In a group of its own Ctrl-C reaches the parent alone, which then ends the child in order.
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::dup2(output, STDOUT_FILENO);
  // That the initiator leaves at the end is no news here; it reports what goes wrong itself.
  ::setenv("KVFERRY_LOG", "error", 0);
  ::execv(own_program, arguments);
  ::_exit(127);
}

/// One line, without its end, or nothing when the other side closed or `until` passed.
std::optional<std::string> read_line(int fd, Clock::time_point until) {
  std::string line;
  while (Clock::now() < until) {
    pollfd entry{fd, POLLIN, 0};
    if (::poll(&entry, 1, 100) <= 0) continue;
    char c = 0;
    if (::read(fd, &c, 1) <= 0) return std::nullopt;
    if (c == '\n') return line;
    line += c;
  }
  return std::nullopt;
}

bool reap_within(pid_t pid, Clock::duration limit) {
  const auto give_up = Clock::now() + limit;
  while (Clock::now() < give_up) {
    if (::waitpid(pid, nullptr, WNOHANG) != 0) return true;
    std::this_thread::sleep_for(2ms);
  }
  return false;
}

}  // namespace

Result<TargetProcess> TargetProcess::start(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"transfer_bench"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return failed("pipe");
  FileDescriptor input(ends[0]);
  FileDescriptor output(ends[1]);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return failed("fork");
  if (pid == 0) become_target(pointers.data(), output.get(), parent);
  output.reset();
  TargetProcess process(pid);
  const std::string_view prefix = address_prefix;
  const auto until = Clock::now() + start_limit;
  while (const auto line = read_line(input.get(), until)) {
    if (!line->starts_with(prefix)) continue;
    process.address_ = line->substr(prefix.size());
    return process;
  }
  return Status(Errc::unreachable, "the target process ended, or said nothing for 15 s, before it told its address");
}

TargetProcess::~TargetProcess() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGTERM);
  if (reap_within(pid_, 2s)) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace kvferry::bench
