#include "program.hpp"

#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvferry::test {

using Clock = std::chrono::steady_clock;

Program::Program(const std::vector<std::string>& words) : begin_(Clock::now()) {
  std::vector<std::string> copies = words;
  std::vector<char*> arguments;
  for (std::string& word : copies) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int output[2];
  int errors[2];
  if (::pipe2(output, O_CLOEXEC) != 0 || ::pipe2(errors, O_CLOEXEC) != 0) return;
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(output[1], STDOUT_FILENO);
    ::dup2(errors[1], STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(output[1]);
  ::close(errors[1]);
  output_ = output[0];
  errors_ = errors[0];
}

Program::~Program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(output_);
  ::close(errors_);
}

void Program::read_available(int wait_ms) {
  pollfd entries[2] = {{output_, POLLIN, 0}, {errors_, POLLIN, 0}};
  if (::poll(entries, 2, wait_ms) <= 0) return;
  char buffer[4096];
  bool read_any = false;
  for (const auto& [fd, events, found] : entries) {
    if ((found & POLLIN) == 0) continue;
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    std::string& text = fd == output_ ? outcome_.output : outcome_.errors;
    if (got > 0) text.append(buffer, static_cast<std::size_t>(got));
    read_any |= got > 0;
  }
  // Both ends closed: poll returns at once, and there is nothing to wait for but the exit.
  if (!read_any) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

std::string Program::wait_for_line(const std::string& prefix, std::chrono::seconds limit) {
  const auto give_up = Clock::now() + limit;
  while (Clock::now() < give_up) {
    std::istringstream lines(outcome_.output);
    for (std::string line; std::getline(lines, line) && !lines.eof();) {
      if (line.starts_with(prefix)) return line;
    }
    read_available(50);
  }
  return {};
}

void Program::signal(int number) const { ::kill(pid_, number); }

Outcome Program::finish(std::chrono::seconds limit) {
  const auto give_up = Clock::now() + limit;
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (Clock::now() > give_up) ::kill(pid_, SIGKILL);
    read_available(20);
  }
  pid_ = -1;
  outcome_.taken = Clock::now() - begin_;
  // What is in the pipes still counts.
  for (std::size_t before = SIZE_MAX; before != outcome_.output.size() + outcome_.errors.size();) {
    before = outcome_.output.size() + outcome_.errors.size();
    read_available(0);
  }
  outcome_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome_;
}

std::vector<pid_t> Program::children() const {
  const std::string pid = std::to_string(pid_);
  std::ifstream list("/proc/" + pid + "/task/" + pid + "/children");
  std::vector<pid_t> found;
  for (pid_t child = 0; list >> child;) found.push_back(child);
  return found;
}

Outcome run(const std::vector<std::string>& words, std::chrono::seconds limit) { return Program(words).finish(limit); }

bool is_running(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto name_end = text.rfind(')');
  return name_end != std::string::npos && text.size() > name_end + 2 && text[name_end + 2] != 'Z';
}

}  // namespace kvferry::test
