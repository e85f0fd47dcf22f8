// What a directory costs with many engines: starts kvferry-directory, keeps many entries published with a connection
// for each heartbeat, as so many engines would, and looks names up meanwhile.
//
//   directory_load --engines 2000 --seconds 30
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/actors/directory_lines.hpp>

DEFINE_string(program, KVFERRY_DIRECTORY_PROGRAM, "kvferry-directory");
DEFINE_int32(engines, 2000, "entries to keep published");
DEFINE_int32(seconds, 30, "how long to look names up, after all are published");
DEFINE_int32(beat_ms, 5000, "time between two heartbeats of an entry; entries live three times as long");
DEFINE_int32(threads, 4, "threads that send heartbeats");

namespace {

using namespace kvferry;
using Microseconds = std::chrono::duration<double, std::micro>;

/// kvferry-directory as a process of its own.
class Program {
 public:
  explicit Program(const std::string& path) {
    int ends[2];
    if (::pipe(ends) != 0) throw StatusError({Errc::resource_exhausted, "no pipe can be made"});
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::close(ends[0]);
      ::close(ends[1]);
      ::execl(path.c_str(), path.c_str(), "--listen", "tcp://127.0.0.1:0", nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    std::string line;
    for (char c = 0; ::read(ends[0], &c, 1) == 1 && c != '\n';) line.push_back(c);
    ::close(ends[0]);
    address_ = line.substr(line.rfind(' ') + 1);
    if (!address_.starts_with("tcp://"))
      throw StatusError({Errc::unreachable, fmt::format("'{}' does not start: give --program", path)});
  }
  ~Program() {
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const std::string& address() const { return address_; }
  /// A line of /proc/PID/status, in KiB.
  long status_kib(const std::string& field) const {
    std::ifstream file(fmt::format("/proc/{}/status", pid_));
    for (std::string line; std::getline(file, line);)
      if (line.starts_with(field + ":")) return std::stol(line.substr(field.size() + 1));
    return -1;
  }
  double cpu_seconds() const {
    std::ifstream file(fmt::format("/proc/{}/stat", pid_));
    std::string word;
    double ticks = 0;
    for (int i = 1; i <= 15 && file >> word; ++i)
      if (i >= 14) ticks += std::stod(word);
    return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
  }

 private:
  pid_t pid_ = -1;
  std::string address_;
};

std::string name_of(int engine) { return fmt::format("node-{:05d}.rack-{:02d}.example", engine, engine % 40); }

/// Publishes its share of the entries again and again, spread over the time of a beat.
void beat(const std::string& address, int first, std::atomic<int>& published, std::atomic<int>& lost,
          const std::atomic<bool>& stop) {
  DirectoryLines lines({address});
  DirectoryKey key{};
  key.fill(static_cast<std::byte>(first + 1));
  const auto share = (FLAGS_engines - first + FLAGS_threads - 1) / FLAGS_threads;
  const Duration pause = std::chrono::milliseconds(FLAGS_beat_ms) / std::max(share, 1);
  TimePoint next = Clock::now();
  for (bool again = false; !stop; again = true) {
    for (int engine = first; engine < FLAGS_engines && !stop; engine += FLAGS_threads) {
      const DirectoryEntry entry{name_of(engine), fmt::format("tcp://10.0.{}.{}:7000", engine / 256, engine % 256),
                                 engine % 3 == 0 ? "prefill" : "decode", std::string(128, 'm'),
                                 static_cast<std::uint64_t>(engine)};
      bool done = false;
      lines.ask(0, 1, {PublishRequest{entry, key, static_cast<std::uint32_t>(3 * FLAGS_beat_ms)}},
                std::chrono::seconds(1), [&](std::size_t, std::size_t, const DirectoryBody& answer) {
                  done = std::holds_alternative<DoneAnswer>(answer);
                  return true;
                });
      lines.close();
      if (!done) ++lost;
      if (!again && done) ++published;
      if (again) std::this_thread::sleep_until(next += pause);
    }
    if (!again) next = Clock::now();
  }
}

int run() {
  if (FLAGS_engines < 1 || FLAGS_seconds < 1 || FLAGS_threads < 1 || FLAGS_beat_ms < 100 || FLAGS_beat_ms > 200000)
    throw StatusError({Errc::invalid_argument, "counts must be at least 1 and --beat_ms 100 to 200000"});
  const Program program(FLAGS_program);
  const long empty_kib = program.status_kib("VmRSS");
  std::atomic<int> published{0};
  std::atomic<int> lost{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < FLAGS_threads; ++i)
    threads.emplace_back([&, i] { beat(program.address(), i, published, lost, stop); });
  const TimePoint give_up = Clock::now() + std::chrono::seconds(60);
  while (published < FLAGS_engines && Clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));

  auto client = DirectoryClient::start({.directories = {program.address()}}).value();
  std::mt19937 random(1);
  std::vector<double> times;
  int missing = 0;
  const double cpu_before = program.cpu_seconds();
  const TimePoint until = Clock::now() + std::chrono::seconds(FLAGS_seconds);
  while (Clock::now() < until) {
    const std::string name = name_of(static_cast<int>(random() % static_cast<unsigned>(FLAGS_engines)));
    const TimePoint begin = Clock::now();
    const auto found = client.find(name);
    times.push_back(Microseconds(Clock::now() - begin).count());
    missing += found && found->name == name ? 0 : 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const double cpu = (program.cpu_seconds() - cpu_before) / FLAGS_seconds;
  const auto listed = client.list("").value().entries.size();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::sort(times.begin(), times.end());
  const auto percentile = [&](double share) {
    return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
  };
  fmt::print(
      "{{\"engines\":{},\"listed\":{},\"lookups\":{},\"missing\":{},\"lost_heartbeats\":{},\"lookup_p50_us\":{:.0f},"
      "\"lookup_p99_us\":{:.0f},\"lookup_max_us\":{:.0f},\"rss_empty_kib\":{},\"rss_kib\":{},\"rss_peak_kib\":{},"
      "\"cpu_percent\":{:.1f}}}\n",
      FLAGS_engines, listed, times.size(), missing, lost.load(), percentile(0.5), percentile(0.99), times.back(),
      empty_kib, program.status_kib("VmRSS"), program.status_kib("VmHWM"), cpu * 100);
  return missing == 0 && listed == static_cast<std::size_t>(FLAGS_engines) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::SetUsageMessage("latency and memory of kvferry-directory with many engines");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "directory_load: {}\n", e.what());
    return 2;
  }
}
