#include "bench/trace_replay.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include <fmt/core.h>

#include "bench/benchmark_run.hpp"
#include "bench/data_check.hpp"
#include "bench/trace_plan.hpp"

namespace kvferry::bench {
namespace {

using namespace std::chrono_literals;

double seconds_between(TimePoint from, TimePoint to) { return std::chrono::duration<double>(to - from).count(); }

class Replay {
 public:
  Replay(Engine& engine, ControlClient& control, const BenchOptions& options)
      : engine_(engine),
        control_(control),
        verify_(options.verify),
        seed_(options.seed),
        prefill_(KvPool::of(options.trace->model, options.trace->prefill_pool)),
        decode_(KvPool::of(options.trace->model, options.trace->decode_cache)),
        planner_(prefill_, decode_, options.seed) {
    result_.options = *options.trace;
    result_.transport = transport_in_use(control.peer());
  }

  Status prepare() {
    auto local = engine_.allocate("bench", decode_.bytes());
    if (!local) return local.status();
    auto remote = control_.prepare(prefill_.bytes());
    if (!remote) return remote.status();
    local_ = *local;
    remote_ = remote->handle;
    // Pages are touched before the first request, as a serving engine's have been.
    std::memset(local_.data(), std::to_integer<int>(poison), local_.size());
    return control_.fill_pool(prefill_.model.block_bytes(), prefill_.blocks(), seed_);
  }

  void begin(double first_timestamp_ms) {
    first_timestamp_ms_ = first_timestamp_ms;
    begin_ = Clock::now();
  }

  double elapsed_seconds() const { return seconds_between(begin_, Clock::now()); }

  /// Waits until the request's recorded time has come; false when that is beyond a limit or `stop` was set.
  bool await_turn(const TraceRequest& request, const std::atomic<bool>& stop) {
    const double speed = result_.options.speed;
    const double due = speed > 0 ? (request.timestamp_ms - first_timestamp_ms_) / 1e3 / speed : 0;
    while (!stop) {
      const double now = elapsed_seconds();
      if (result_.options.seconds > 0 && now >= result_.options.seconds) return false;
      if (now >= due) {
        if (speed > 0) result_.max_lag_ms = std::max(result_.max_lag_ms, (now - due) * 1e3);
        return true;
      }
      std::this_thread::sleep_for(
          std::min<std::chrono::duration<double>>(std::chrono::duration<double>(due - now), 50ms));
    }
    return false;
  }

  Status serve(const TraceRequest& request) {
    const RequestPlan plan = planner_.plan(request);
    Clock::duration taken{0};
    for (const auto& moves : plan.transfers) {
      auto part = transfer(moves);
      if (!part) return part.status();
      taken += *part;
    }
    account(request, plan, taken);
    return Status::ok();
  }

  TraceResult result() {
    if (verify_) result_.verified = result_.mismatch.empty();
    return std::move(result_);
  }

 private:
  Result<Clock::duration> transfer(const std::vector<PageMove>& moves) {
    const std::vector<Slice> slices = planner_.make_slices(moves);
    if (verify_) poison_blocks(slices);
    const TimePoint begin = Clock::now();
    const Status status = engine_.read(control_.peer(), local_, remote_, slices).wait();
    const TimePoint end = Clock::now();
    if (!status) return status;
    if (verify_) check(slices);
    return end - begin;
  }

  void poison_blocks(const std::vector<Slice>& slices) {
    for (const Slice& slice : slices) {
      std::memset(local_.data() + slice.local_offset, std::to_integer<int>(poison), slice.length);
    }
  }

  void check(const std::vector<Slice>& slices) {
    for (std::size_t i = 0; i < slices.size() && result_.mismatch.empty(); ++i) {
      const std::uint64_t key = block_key(seed_, 0, slices[i].remote_offset / slices[i].length);
      const auto bytes = local_.bytes().subspan(slices[i].local_offset, slices[i].length);
      const auto at = find_difference(bytes, key);
      if (!at) continue;
      const Mismatch mismatch{0, i, *at, expected_byte(key, *at), bytes[*at]};
      result_.mismatch = fmt::format("request {}: {}", result_.requests, mismatch.to_string());
    }
  }

  void account(const TraceRequest& request, const RequestPlan& plan, Clock::duration taken) {
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
    const TraceOptions& options = result_.options;
    const double ttft_us =
        options.ttft_ms * 1e3 + options.ttft_us_per_token * static_cast<double>(request.input_length);
    ++result_.requests;
    result_.bytes += plan.pages_moved * decode_.model.page_bytes();
    result_.bytes_skipped += plan.pages_skipped * decode_.model.page_bytes();
    if (static_cast<double>(nanoseconds) / 1e3 < ttft_share * ttft_us) ++result_.under_budget;
    if (plan.transfers.empty()) {
      ++result_.fully_cached;
    } else {
      result_.latency.record(static_cast<std::uint64_t>(nanoseconds));
    }
  }

  Engine& engine_;
  ControlClient& control_;
  bool verify_;
  std::uint64_t seed_;
  KvPool prefill_;
  KvPool decode_;
  TracePlanner planner_;
  Region local_;
  RemoteHandle remote_;
  double first_timestamp_ms_ = 0;
  TimePoint begin_;
  TraceResult result_;
};

}  // namespace

Result<TraceResult> replay_trace(Engine& engine, ControlClient& control, const BenchOptions& options,
                                 const std::vector<TraceRequest>& requests, const std::atomic<bool>& stop,
                                 const TraceProgress& progress) {
  Replay replay(engine, control, options);
  if (auto status = replay.prepare(); !status) return status;
  replay.begin(requests.front().timestamp_ms);
  for (std::size_t i = 0; i < requests.size() && replay.await_turn(requests[i], stop); ++i) {
    if (progress) progress(i + 1, requests.size());
    if (auto status = replay.serve(requests[i]); !status) {
      return status.with_context(fmt::format("request {} of the trace", i + 1));
    }
  }
  return replay.result();
}

}  // namespace kvferry::bench
