// What an engine costs that has nothing to do: two connected engines, this process's CPU time over
// wall time, halved.
//
//   idle_cost --seconds 30
#include <cstdio>
#include <thread>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <sys/resource.h>

#include <kvferry/actors/engine.hpp>

DEFINE_int32(seconds, 30, "how long to watch");
DEFINE_string(transport, "", "shm or tcp; empty: all that are possible");

namespace {

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int run() {
  if (FLAGS_seconds < 1) throw kvferry::StatusError({kvferry::Errc::invalid_argument, "--seconds must be at least 1"});
  kvferry::EngineConfig config;
  if (!FLAGS_transport.empty()) config.transports = {FLAGS_transport};
  config.name = "first";
  auto first = kvferry::Engine::start(config).value();
  config.name = "second";
  auto second = kvferry::Engine::start(config).value();
  const auto peer = first.connect(second.address()).value();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(FLAGS_seconds));
  const double share = (cpu_seconds() - before) / FLAGS_seconds / 2;
  fmt::print("{{\"seconds\":{},\"peer\":\"{}\",\"cpu_percent_per_engine\":{:.3f}}}\n", FLAGS_seconds, peer.describe(),
             share * 100);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::SetUsageMessage("CPU use of idle, connected engines");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "idle_cost: {}\n", e.what());
    return 2;
  }
}
