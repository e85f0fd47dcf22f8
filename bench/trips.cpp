#include "bench/trips.hpp"

#include <algorithm>
#include <chrono>

#include <fmt/core.h>

#include "bench/data_check.hpp"

namespace kvferry::bench {
namespace {

std::uint64_t nanoseconds(Clock::duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
}

TimePoint end_of(TimePoint begin, const TripLimits& limits) {
  if (limits.seconds <= 0) return TimePoint::max();
  // Beyond a year a limit is none: the clock's range must not overflow.
  constexpr double year = 365.0 * 24 * 3600;
  return begin + std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(limits.seconds, year) * 1e9));
}

}  // namespace

Result<TimedSection> run_trips(TripIssuer& issuer, const TripLimits& limits, const std::atomic<bool>& stop,
                               LatencyStats& stats) {
  const std::uint64_t most = limits.trips == 0 ? UINT64_MAX : limits.trips;
  const auto lanes = static_cast<std::uint32_t>(std::min<std::uint64_t>(issuer.lanes(), most));
  std::vector<TimePoint> submitted(lanes);
  std::uint64_t submissions = 0;
  std::uint64_t trips = 0;
  const TimePoint begin = Clock::now();
  const TimePoint end = end_of(begin, limits);
  for (; submissions < lanes; ++submissions) {
    submitted[submissions] = Clock::now();
    issuer.submit(static_cast<std::uint32_t>(submissions));
  }
  TimePoint now = begin;
  for (std::uint32_t lane = 0; trips < submissions; lane = lane + 1 == lanes ? 0 : lane + 1) {
    if (auto status = issuer.wait(lane); !status) return status;
    now = Clock::now();
    stats.record(nanoseconds(now - submitted[lane]));
    ++trips;
    if (submissions >= most || now >= end || stop.load(std::memory_order_relaxed)) continue;
    submitted[lane] = Clock::now();
    issuer.submit(lane);
    ++submissions;
  }
  return TimedSection{trips, std::chrono::duration<double>(now - begin).count()};
}

OneSidedTrips::OneSidedTrips(Engine& engine, Peer peer, Region local, RemoteHandle remote, const BenchCase& bench_case)
    : engine_(engine),
      peer_(std::move(peer)),
      local_(std::move(local)),
      remote_(std::move(remote)),
      op_(bench_case.op),
      transfers_(bench_case.workload.parts) {
  for (std::uint32_t part = 0; part < bench_case.workload.parts; ++part) {
    slices_.push_back(make_slices(bench_case.workload, part));
  }
}

void OneSidedTrips::submit(std::uint32_t lane) {
  switch (op_) {
    case BenchOp::read:
      transfers_[lane] = engine_.read(peer_, local_, remote_, slices_[lane]);
      return;
    case BenchOp::write:
      transfers_[lane] = engine_.write(peer_, local_, remote_, slices_[lane]);
      return;
    case BenchOp::write_imm:
      transfers_[lane] =
          engine_.write_imm(peer_, local_, remote_, slices_[lane], static_cast<std::uint32_t>(notifications_++));
      return;
    case BenchOp::sendrecv:
      transfers_[lane] = Transfer::ended({Errc::internal, "sendrecv is not one-sided"});
      return;
  }
}

EchoTrips::EchoTrips(Engine& engine, Peer outgoing, Peer incoming, const BenchCase& bench_case)
    : engine_(engine),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      workload_(bench_case.workload),
      lanes_(workload_.parts) {
  for (Lane& lane : lanes_) {
    lane.sent.resize(workload_.transfer_bytes());
    lane.echoed.resize(workload_.transfer_bytes());
    lane.sends.resize(workload_.batch_size);
    lane.receives.resize(workload_.batch_size);
  }
}

std::span<std::byte> EchoTrips::message(std::vector<std::byte>& batch, std::uint32_t index) const {
  return std::span(batch).subspan(index * workload_.block_size, workload_.block_size);
}

void EchoTrips::submit(std::uint32_t index) {
  Lane& lane = lanes_[index];
  for (std::uint32_t i = 0; i < workload_.batch_size; ++i) {
    lane.receives[i] = engine_.recv(incoming_, message(lane.echoed, i));
    lane.sends[i] = engine_.send(outgoing_, message(lane.sent, i));
  }
}

Status EchoTrips::wait(std::uint32_t index) {
  for (const Transfer& transfer : lanes_[index].receives) {
    if (auto status = transfer.wait(); !status) return status.with_context("receiving an echo");
  }
  for (const Transfer& transfer : lanes_[index].sends) {
    if (auto status = transfer.wait(); !status) return status.with_context("sending");
  }
  return Status::ok();
}

void EchoTrips::fill(std::uint64_t round) {
  std::uint64_t block = 0;
  for (Lane& lane : lanes_) {
    for (std::uint32_t i = 0; i < workload_.batch_size; ++i) {
      fill_block(message(lane.sent, i), block_key(workload_.seed, round, block++));
    }
  }
}

void EchoTrips::poison_echoes() {
  for (Lane& lane : lanes_) std::fill(lane.echoed.begin(), lane.echoed.end(), poison);
}

std::string EchoTrips::verify(std::uint64_t round) const {
  std::uint64_t block = 0;
  for (std::uint32_t part = 0; part < lanes_.size(); ++part) {
    for (std::uint32_t i = 0; i < workload_.batch_size; ++i, ++block) {
      const auto bytes = std::span(lanes_[part].echoed).subspan(i * workload_.block_size, workload_.block_size);
      const std::uint64_t key = block_key(workload_.seed, round, block);
      const auto at = find_difference(bytes, key);
      if (at) return "echo, " + Mismatch{part, i, *at, expected_byte(key, *at), bytes[*at]}.to_string();
    }
  }
  return {};
}

}  // namespace kvferry::bench
