// An engine in a process of its own that obeys the test (target_process.cpp says what it understands).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/e2e/engines.hpp"
#include "tests/support/process.hpp"

namespace kvferry::test {

class Target {
 public:
  /// `variables` are those of the engine's configuration, such as "KVFERRY_TRANSPORTS=tcp".
  explicit Target(const std::vector<std::string>& variables = {}) : process(KVFERRY_TARGET_PROCESS, variables) {
    const std::string ready = process.read_line(slow(20s)).value_or("nothing");
    if (!ready.starts_with("ready ")) throw std::runtime_error("the target process said: " + ready);
    const auto space = ready.rfind(' ');
    address = ready.substr(6, space - 6);
    incarnation = std::stoull(ready.substr(space + 1));
  }

  /// Its answer to a command.
  std::string ask(const std::string& command) {
    if (!process.write_line(command)) return "the target process is gone";
    return process.read_line(slow(30s)).value_or("the target process did not answer");
  }
  std::uint64_t ask_number(const std::string& command) {
    const std::string answer = ask(command);
    EXPECT_TRUE(!answer.empty() && answer.find_first_not_of("0123456789") == std::string::npos)
        << command << ": " << answer;
    return std::strtoull(answer.c_str(), nullptr, 10);
  }

  Process process;
  std::string address;
  std::uint64_t incarnation = 0;
};

}  // namespace kvferry::test
