// The other process of a test: an engine, set up by KVFERRY_* variables, that obeys one command a line
// on its standard input and answers each with one line. It ends with its input.
//
//   (start)                    ready ADDRESS INCARNATION
//   allocate NAME BYTES        ok            engine-allocated memory
//   register NAME BYTES        ok            its own memory
//   unregister NAME            ok
//   fill NAME SEED             ok
//   wrong NAME SEED            BYTES that differ from the pattern
//   nonzero NAME               BYTES
//   die_at NAME OFFSET         ok            then SIGKILL once that byte is not zero
//   connect ADDRESS            ok
//   notification MILLISECONDS  PEER IMMEDIATE
//   counter NAME               VALUE of the engine's metrics
//   cpu                        MICROSECONDS that the process has computed
//
// What fails answers "error TEXT".
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <kvferry/actors/engine.hpp>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

class Obedient {
 public:
  explicit Obedient(Engine& engine) : engine_(engine) {}

  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    std::string name;
    std::uint64_t number = 0;
    words >> command >> name >> number;
    if (command == "allocate") return keep(engine_.allocate(name, number));
    if (command == "register") return keep(engine_.register_memory(name, own_memory(number), number));
    if (command == "unregister") return said(engine_.unregister_region(regions_.at(name)));
    if (command == "fill") return fill(regions_.at(name).bytes(), number), "ok";
    if (command == "wrong") return std::to_string(wrong_bytes(regions_.at(name).bytes(), number));
    if (command == "nonzero") return std::to_string(nonzero_bytes(regions_.at(name).bytes()));
    if (command == "die_at") return die_at(regions_.at(name).data() + number);
    if (command == "connect") return said(engine_.connect(name).status());
    if (command == "notification") return notification(std::chrono::milliseconds(std::stoi(name)));
    if (command == "counter") return std::to_string(counter(engine_, name));
    if (command == "cpu") return std::to_string(cpu_microseconds());
    return fmt::format("error no command '{}'", command);
  }

 private:
  static std::string said(const Status& status) { return status.is_ok() ? "ok" : "error " + status.to_string(); }

  std::string keep(Result<Region> region) {
    if (!region) return said(region.status());
    regions_[region->name()] = *region;
    return "ok";
  }

  std::byte* own_memory(std::uint64_t bytes) {
    memory_.push_back(std::make_unique<std::vector<std::byte>>(bytes));
    return memory_.back()->data();
  }

  static std::string die_at(const std::byte* place) {
    std::thread([place] {
      while (std::atomic_ref(*const_cast<std::byte*>(place)).load(std::memory_order_relaxed) == std::byte{0})
        std::this_thread::yield();
      ::kill(::getpid(), SIGKILL);
    }).detach();
    return "ok";
  }

  std::string notification(Duration limit) {
    const auto arrived = engine_.next_notification(limit);
    return arrived ? fmt::format("{} {}", arrived->peer, arrived->immediate) : said(arrived.status());
  }

  static std::int64_t cpu_microseconds() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto of = [](const timeval& time) { return time.tv_sec * std::int64_t{1'000'000} + time.tv_usec; };
    return of(usage.ru_utime) + of(usage.ru_stime);
  }

  Engine& engine_;
  std::map<std::string, Region> regions_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
};

int serve() {
  auto engine = Engine::start({});
  if (!engine) {
    std::cout << "error " << engine.status().to_string() << std::endl;
    return 1;
  }
  std::cout << "ready " << engine->address() << ' ' << engine->incarnation() << std::endl;
  Obedient obedient(*engine);
  for (std::string line; std::getline(std::cin, line);) std::cout << obedient.answer(line) << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvferry::test

int main() { return kvferry::test::serve(); }
