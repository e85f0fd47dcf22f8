#include "tests/support/process.hpp"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::vector<std::string> merged_environment(const std::vector<std::string>& variables) {
  std::vector<std::string> merged = variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view present(*entry);
    const std::string_view name = present.substr(0, present.find('=') + 1);
    bool replaced = false;
    for (const auto& variable : variables) replaced |= variable.starts_with(name);
    if (!replaced) merged.emplace_back(present);
  }
  return merged;
}

// Between fork and exec: only calls that are safe there.
[[noreturn]] void become(const char* program, char* const* environment, int input, int output, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(126);
  ::dup2(input, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  char* const arguments[] = {const_cast<char*>(program), nullptr};
  ::execve(program, arguments, environment);
  ::_exit(127);
}

long status_value_of(const std::string& process, std::string_view field) {
  std::ifstream file("/proc/" + process + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field) && line.size() > field.size() && line[field.size()] == ':')
      return std::strtol(line.c_str() + field.size() + 1, nullptr, 10);
  return -1;
}

int open_descriptors_of(const std::string& process) {
  std::error_code error;
  int count = 0;
  for (auto place = std::filesystem::directory_iterator("/proc/" + process + "/fd", error);
       !error && place != std::filesystem::directory_iterator(); place.increment(error))
    ++count;
  return count;
}

}  // namespace

Process::Process(const std::string& program, const std::vector<std::string>& variables) {
  std::vector<std::string> environment = merged_environment(variables);
  std::vector<char*> pointers;
  for (std::string& entry : environment) pointers.push_back(entry.data());
  pointers.push_back(nullptr);
  int in[2];
  int out[2];
  // A socket, so that writing to a child that is gone raises no SIGPIPE.
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0)
    throw std::system_error(errno, std::generic_category(), "socketpair");
  if (::pipe2(out, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid_ == 0) become(program.c_str(), pointers.data(), in[1], out[1], parent);
  ::close(in[1]);
  ::close(out[1]);
  input_ = in[0];
  output_ = out[0];
}

Process::~Process() {
  if (!ended_) {
    signal(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(input_);
  ::close(output_);
}

bool Process::write_line(std::string_view line) {
  const std::string whole = std::string(line) + "\n";
  return ::send(input_, whole.data(), whole.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(whole.size());
}

std::optional<std::string> Process::read_line(Duration limit) {
  const auto until = Clock::now() + limit;
  while (true) {
    if (const auto end = unread_.find('\n'); end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd entry{output_, POLLIN, 0};
    if (left <= 0 || ::poll(&entry, 1, static_cast<int>(left)) <= 0) return std::nullopt;
    char buffer[4096];
    const ssize_t got = ::read(output_, buffer, sizeof buffer);
    if (got <= 0) return std::nullopt;
    unread_.append(buffer, static_cast<std::size_t>(got));
  }
}

void Process::signal(int number) const {
  if (!ended_) ::kill(pid_, number);
}

std::optional<int> Process::wait(Duration limit) {
  const auto until = Clock::now() + limit;
  while (!ended_) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      ended_ = status;
    } else if (Clock::now() >= until) {
      break;
    } else {
      std::this_thread::sleep_for(1ms);
    }
  }
  return ended_;
}

long Process::status_value(std::string_view field) const { return status_value_of(std::to_string(pid_), field); }
int Process::open_descriptors() const { return open_descriptors_of(std::to_string(pid_)); }

long own_status_value(std::string_view field) { return status_value_of("self", field); }
int own_open_descriptors() { return open_descriptors_of("self"); }

}  // namespace kvferry::test
