// transfer_bench: moves KV blocks between two processes, checks them, and says how fast that was.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <unistd.h>

#include <kvferry/actors/benchmark.hpp>
#include <kvferry/actors/engine.hpp>

#include "bench/benchmark_run.hpp"
#include "bench/control.hpp"
#include "bench/flags.hpp"
#include "bench/options.hpp"
#include "bench/report.hpp"
#include "bench/stop_signal.hpp"
#include "bench/target.hpp"
#include "bench/target_process.hpp"
#include "bench/trace_replay.hpp"

namespace kvferry::bench {
namespace {

int fail(const Status& status) {
  fmt::print(stderr, "transfer_bench: {}\n", status.to_string());
  return exit_failed;
}

void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

int run_target(const BenchOptions& options) {
  EngineConfig config = make_engine_config(options);
  config.name = fmt::format("bench-target-{}", ::getpid());
  if (!options.local_endpoint.empty()) config.listen = options.local_endpoint;
  auto engine = Engine::start(config);
  if (!engine) return fail(engine.status());
  print(fmt::format("{}{}\n", address_prefix, engine->address()));
  serve_initiators(*engine, stop_requested);
  return exit_ok;
}

/// Where the initiator listens, so that the target can connect back.
Result<std::string> initiator_endpoint(const BenchOptions& options) {
  if (!options.local_endpoint.empty()) return options.local_endpoint;
  auto host = host_towards(options.remote_endpoint);
  if (!host) return host.status();
  return fmt::format("tcp://{}:0", *host);
}

int verdict(bool all_right) {
  if (stop_requested) return exit_interrupted;
  return all_right ? exit_ok : exit_failed;
}

void report_mismatch(const std::string& mismatch) {
  if (!mismatch.empty()) fmt::print(stderr, "transfer_bench: WRONG BYTES: {}\n", mismatch);
}

/// Lets a benchmark actor run the job to its end. Each step is bounded and looks at the stop flag, so
/// the sum needs no limit of its own but that of what a person may have asked for.
Status run_job(BenchmarkJob& job) {
  BenchmarkActorHandle actor(job);
  return actor.wait(std::chrono::hours(24 * 365));
}

int run_sweep(Engine& engine, ControlClient control, const BenchOptions& options) {
  const std::vector<BenchCase> cases = make_cases(options);
  auto run = BenchmarkRun::create(engine, std::move(control), options, cases, stop_requested);
  if (!run) return fail(run.status());
  if (options.progress) {
    run->on_progress([](const BenchCase& one, std::uint32_t round, std::uint32_t rounds) {
      fmt::print(stderr, "{} {} x {} bytes: round {} of {}\n", to_string(one.op), one.workload.batch_size,
                 one.workload.block_size, round, rounds);
    });
  }
  bool all_right = true;
  const auto report = [&](const CaseResult& result) {
    print(sweep_row(options.output, result));
    report_mismatch(result.mismatch);
    all_right &= result.mismatch.empty();
  };
  SweepJob job(std::move(*run), cases, report, stop_requested);
  print(sweep_header(options.output));
  if (auto status = run_job(job); !status) return fail(status);
  return verdict(all_right);
}

int run_trace(Engine& engine, ControlClient control, const BenchOptions& options,
              const std::vector<TraceRequest>& requests) {
  auto replay = TraceReplay::create(engine, control, options, requests, stop_requested);
  if (!replay) return fail(replay.status());
  if (options.progress) {
    (*replay)->on_progress([](std::uint64_t request, std::uint64_t all) {
      if (request % 100 == 1) fmt::print(stderr, "request {} of {}\n", request, all);
    });
  }
  if (auto status = run_job(**replay); !status) return fail(status);
  const TraceResult result = (*replay)->result();
  print(trace_report(options.output, result));
  report_mismatch(result.mismatch);
  if (auto status = control.bye(); !status) return fail(status);
  return verdict(result.mismatch.empty());
}

int run_initiator(const BenchOptions& options) {
  std::vector<TraceRequest> requests;
  if (options.trace) {
    auto trace = read_trace_file(options.trace->file, options.trace->requests);
    if (!trace) return fail(trace.status());
    requests = std::move(*trace);
  }
  auto endpoint = initiator_endpoint(options);
  if (!endpoint) return fail(endpoint.status());
  EngineConfig config = make_engine_config(options);
  config.name = fmt::format("bench-initiator-{}", ::getpid());
  config.listen = *endpoint;
  auto engine = Engine::start(config);
  if (!engine) return fail(engine.status());
  auto control = ControlClient::connect(*engine, options.remote_endpoint);
  if (!control) return fail(control.status());
  if (options.trace) return run_trace(*engine, std::move(*control), options, requests);
  return run_sweep(*engine, std::move(*control), options);
}

int run_both(BenchOptions options) {
  auto target =
      TargetProcess::start({"--mode=target", "--local-endpoint=tcp://127.0.0.1:0", "--transport=" + options.transport,
                            "--num-rails=" + std::to_string(options.num_rails)});
  if (!target) return fail(target.status());
  options.remote_endpoint = target->address();
  return run_initiator(options);
}

int run(const BenchOptions& options) {
  switch (options.mode) {
    case Mode::target:
      return run_target(options);
    case Mode::initiator:
      return run_initiator(options);
    case Mode::both:
      return run_both(options);
  }
  return exit_usage;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  using namespace kvferry::bench;
  const FlagValues values = parse_flags(argc, argv);
  const auto options = make_options(values);
  if (!options) {
    fmt::print(stderr, "transfer_bench: {}\n", options.status().text());
    return exit_usage;
  }
  // A peer that closes a raw socket of the floor is an error to report, not the end of the process.
  std::signal(SIGPIPE, SIG_IGN);
  catch_stop_signals();
  try {
    return run(*options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "transfer_bench: {}\n", error.what());
    return exit_failed;
  }
}
