#include "bench/trace_replay.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include <fmt/core.h>

#include "bench/benchmark_run.hpp"
#include "bench/data_check.hpp"

namespace kvferry::bench {
namespace {

constexpr double longest_wait_seconds = 0.5;

void sleep_seconds(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace

Result<std::unique_ptr<TraceReplay>> TraceReplay::create(Engine& engine, ControlClient& control,
                                                         const BenchOptions& options,
                                                         const std::vector<TraceRequest>& requests,
                                                         const std::atomic<bool>& stop) {
  std::unique_ptr<TraceReplay> replay(new TraceReplay(engine, control, options, requests, stop));
  if (auto status = replay->prepare(); !status) return status;
  return replay;
}

TraceReplay::TraceReplay(Engine& engine, ControlClient& control, const BenchOptions& options,
                         const std::vector<TraceRequest>& requests, const std::atomic<bool>& stop)
    : engine_(engine),
      control_(control),
      requests_(requests),
      stop_(stop),
      verify_(options.verify),
      seed_(options.seed),
      prefill_(KvPool::of(options.trace->model, options.trace->prefill_pool)),
      decode_(KvPool::of(options.trace->model, options.trace->decode_cache)),
      planner_(prefill_, decode_, options.seed) {
  result_.options = *options.trace;
}

Status TraceReplay::prepare() {
  auto local = engine_.allocate("bench", decode_.bytes());
  if (!local) return local.status();
  auto remote = control_.prepare(prefill_.bytes());
  if (!remote) return remote.status();
  local_ = *local;
  remote_ = remote->handle;
  std::memset(local_.data(), std::to_integer<int>(poison), local_.size());
  if (auto status = control_.fill_pool(prefill_.model.block_bytes(), prefill_.blocks(), seed_); !status) return status;
  return touch_everything();
}

/// Reads the whole remote pool once: in a serving engine all pages have been used before.
Status TraceReplay::touch_everything() {
  const std::uint64_t step = std::min(local_.size(), remote_.size());
  for (std::uint64_t offset = 0; offset < remote_.size(); offset += step) {
    const Slice slice{0, offset, std::min(step, remote_.size() - offset)};
    if (auto status = engine_.read(control_.peer(), local_, remote_, {&slice, 1}).wait(); !status) return status;
  }
  return Status::ok();
}

Result<bool> TraceReplay::step() {
  if (!begin_) begin_ = Clock::now();
  if (over()) return false;
  const TraceRequest& request = requests_[next_];
  const double early = due_seconds(request) - elapsed_seconds();
  if (early > longest_wait_seconds) {
    sleep_seconds(longest_wait_seconds);
    return true;
  }
  if (early > 0) sleep_seconds(early);
  if (result_.options.speed > 0) {
    result_.max_lag_ms = std::max(result_.max_lag_ms, (elapsed_seconds() - due_seconds(request)) * 1e3);
  }
  ++next_;
  if (progress_) progress_(next_, requests_.size());
  if (auto status = serve(request); !status) return status.with_context(fmt::format("request {} of the trace", next_));
  return true;
}

bool TraceReplay::over() const {
  const double limit = result_.options.seconds;
  return next_ == requests_.size() || stop_ || (limit > 0 && elapsed_seconds() >= limit);
}

double TraceReplay::elapsed_seconds() const { return std::chrono::duration<double>(Clock::now() - *begin_).count(); }

double TraceReplay::due_seconds(const TraceRequest& request) const {
  const double speed = result_.options.speed;
  return speed > 0 ? (request.timestamp_ms - requests_.front().timestamp_ms) / 1e3 / speed : 0;
}

Status TraceReplay::serve(const TraceRequest& request) {
  const RequestPlan plan = planner_.plan(request);
  Duration taken{0};
  for (const auto& moves : plan.transfers) {
    auto part = transfer(moves);
    if (!part) return part.status();
    taken += *part;
  }
  account(request, plan, taken);
  return Status::ok();
}

Result<Duration> TraceReplay::transfer(const std::vector<PageMove>& moves) {
  const std::vector<Slice> slices = planner_.make_slices(moves);
  if (verify_) poison_blocks(slices);
  const TimePoint begin = Clock::now();
  const Status status = engine_.read(control_.peer(), local_, remote_, slices).wait();
  const TimePoint end = Clock::now();
  if (!status) return status;
  if (verify_) check(slices);
  return end - begin;
}

void TraceReplay::poison_blocks(const std::vector<Slice>& slices) {
  for (const Slice& slice : slices) {
    std::memset(local_.data() + slice.local_offset, std::to_integer<int>(poison), slice.length);
  }
}

void TraceReplay::check(const std::vector<Slice>& slices) {
  for (std::size_t i = 0; i < slices.size() && result_.mismatch.empty(); ++i) {
    const std::uint64_t key = block_key(seed_, 0, slices[i].remote_offset / slices[i].length);
    const auto bytes = local_.bytes().subspan(slices[i].local_offset, slices[i].length);
    const auto at = find_difference(bytes, key);
    if (!at) continue;
    const Mismatch mismatch{0, i, *at, expected_byte(key, *at), bytes[*at]};
    result_.mismatch = fmt::format("request {}: {}", next_, mismatch.to_string());
  }
}

void TraceReplay::account(const TraceRequest& request, const RequestPlan& plan, Duration taken) {
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
  const TraceOptions& options = result_.options;
  const double ttft_us = options.ttft_ms * 1e3 + options.ttft_us_per_token * static_cast<double>(request.input_length);
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

TraceResult TraceReplay::result() const {
  TraceResult result = result_;
  result.transport = transport_in_use(control_.peer());
  if (verify_) result.verified = result.mismatch.empty();
  return result;
}

}  // namespace kvferry::bench
