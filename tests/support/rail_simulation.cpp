#include "tests/support/rail_simulation.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace kvferry::test {
namespace {

std::byte pattern(std::uint64_t at) { return static_cast<std::byte>(at * 31 + (at >> 12) * 7 + 3); }

}  // namespace

RailSimulation::RailSimulation(const RailLoad& load)
    : load_(load), nic_(CorePair::devices(load.rails)), pair_(nic_, load.rails, load.verbs), running_(load.in_flight) {
  nic_.move_bytes(load.verify);
  // Coming up takes no simulated time.
  pair_.open_rails();
  nic_.keep_time(load.speed);
  // One block's room after each block. Transfers that are not compared may share their memory.
  const std::uint64_t span = load.blocks * 2 * load.block_bytes;
  pair_.add_regions(span * (load.verify ? load.in_flight : 1));
  for (std::size_t slot = 0; slot < load.in_flight; ++slot) {
    auto& slices = slices_.emplace_back();
    const std::uint64_t begin = load.verify ? slot * span : 0;
    for (std::size_t i = 0; i < load.blocks; ++i) {
      const std::uint64_t there = begin + i * 2 * load.block_bytes;
      slices.push_back({begin + (load.blocks - 1 - i) * 2 * load.block_bytes, there, load.block_bytes});
    }
  }
  if (load.verify) fill();
  for (std::size_t slot = 0; slot < load.in_flight; ++slot) submit(slot);
}

void RailSimulation::fill() {
  const RegionRecord& source = load_.op == Op::read ? *pair_.served : *pair_.local;
  for (std::uint64_t i = 0; i < source.size; ++i) source.data[i] = pattern(i);
}

void RailSimulation::submit(std::size_t slot) { running_[slot] = pair_.submit(load_.op, slices_[slot]); }

void RailSimulation::collect(std::size_t slot) {
  if (!running_[slot]->status().is_ok()) return failures_.push_back(running_[slot]->status());
  ++ok_;
  if (!load_.verify) return;
  const RegionRecord& into = load_.op == Op::read ? *pair_.local : *pair_.served;
  for (const Slice& slice : slices_[slot]) {
    if (std::memcmp(pair_.local->data + slice.local_offset, pair_.served->data + slice.remote_offset, slice.length) !=
        0)
      ++wrong_;
    // What the next transfer brings must be its own.
    std::memset(into.data + (load_.op == Op::read ? slice.local_offset : slice.remote_offset), 0, slice.length);
  }
}

void RailSimulation::step() {
  const std::uint64_t before = nic_.counts().requests;
  pair_.step();
  for (std::size_t slot = 0; slot < running_.size(); ++slot) {
    if (!running_[slot] || !running_[slot]->done()) continue;
    collect(slot);
    running_[slot] = {};
    if (!finishing_) submit(slot);
  }
  const std::uint64_t posted = nic_.counts().requests - before;
  nic_.advance(std::chrono::nanoseconds(load_.poll_ns + posted * load_.request_ns));
}

void RailSimulation::run_for(std::chrono::nanoseconds time) {
  const TimePoint end = nic_.now() + time;
  while (nic_.now() < end) step();
}

bool RailSimulation::finish(std::chrono::nanoseconds limit) {
  const TimePoint end = nic_.now() + limit;
  finishing_ = true;
  const auto is_running = [](const RefPtr<TransferState>& transfer) { return static_cast<bool>(transfer); };
  while (nic_.now() < end && std::ranges::any_of(running_, is_running)) step();
  return std::ranges::none_of(running_, is_running);
}

double RailSimulation::bytes_per_second(std::chrono::nanoseconds time) {
  const std::uint64_t before = nic_.counts().bytes;
  const TimePoint start = nic_.now();
  run_for(time);
  const double seconds = std::chrono::duration<double>(nic_.now() - start).count();
  return static_cast<double>(nic_.counts().bytes - before) / seconds;
}

double RailSimulation::measure_share(std::chrono::nanoseconds time, std::uint32_t of_rails) {
  const double line = static_cast<double>(load_.speed.gbit) * 1e9 / 8;
  const double operations = static_cast<double>(load_.speed.operations) * static_cast<double>(load_.block_bytes);
  return bytes_per_second(time) / (std::min(line, operations) * of_rails);
}

void RailSimulation::lose_port(std::uint32_t rail) { nic_.set_port(fmt::format("a{}", rail), 1, IBV_PORT_DOWN); }

void RailSimulation::lose_peer(std::uint32_t rail) { nic_.set_port(fmt::format("b{}", rail), 1, IBV_PORT_DOWN); }

}  // namespace kvferry::test
