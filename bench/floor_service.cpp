#include "bench/floor_service.hpp"

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/shm_ping.hpp"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t max_sockets = 64;

Status bad_request(std::string_view why) { return {Errc::malformed, fmt::format("floor request: {}", why)}; }

/// Serves trips over sockets.
class TcpFloorServer : public FloorServer {
 public:
  TcpFloorServer(RawListener listener, const FloorRequest& request, std::span<std::byte> region)
      : listener_(std::move(listener)), request_(request) {
    if (request.op == BenchOp::sendrecv) {
      message_.resize(request.workload.transfer_bytes());
      shares_.resize(1);
      shares_.front().add(message_.data(), message_.size());
    } else {
      shares_ = make_shares(region, floor_slices(request.workload), Side::remote, request.sockets);
    }
    thread_ = std::thread([this] { run(); });
  }

  ~TcpFloorServer() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      sockets_.shut_down();
    }
    thread_.join();
  }

  int port() const override { return listener_.port(); }

 private:
  void run() {
    auto accepted = listener_.accept(request_.sockets);
    if (!accepted) return;
    auto sockets = RawSockets::adopt(std::move(*accepted), request_.mode, request_.buffer_bytes);
    if (!sockets) return;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      sockets_ = std::move(*sockets);
    }
    while (serve_one() || idle()) {
    }
  }

  /// False when the initiator was silent or has gone; it sees the reason on its own side.
  bool serve_one() {
    status_ = Status::ok();
    switch (request_.op) {
      case BenchOp::read:
        status_ = sockets_.receive_signal();
        return status_ && (status_ = sockets_.transmit(shares_, Direction::send));
      case BenchOp::write:
      case BenchOp::write_imm:
        status_ = sockets_.transmit(shares_, Direction::receive);
        return status_ && (status_ = sockets_.send_signal());
      case BenchOp::sendrecv:
        status_ = sockets_.transmit(shares_, Direction::receive);
        return status_ && (status_ = sockets_.transmit(shares_, Direction::send));
    }
    return false;
  }

  /// Silence between two rounds is no failure as long as no trip had begun.
  bool idle() const { return status_ == Errc::timed_out && shares_.front().untouched() && !stop_; }

  RawListener listener_;
  FloorRequest request_;
  std::vector<Share> shares_;
  std::vector<std::byte> message_;
  std::mutex mutex_;
  std::atomic<bool> stop_{false};
  RawSockets sockets_;
  Status status_;
  std::thread thread_;
};

/// Serves trips that need the target's CPU although memory is shared.
class ShmFloorServer : public FloorServer {
 public:
  ShmFloorServer(SharedMemory memory, const FloorRequest& request)
      : ping_(std::move(memory)), echoes_(request.op == BenchOp::sendrecv), message_(ping_.request_area().size()) {
    thread_ = std::thread([this] { run(); });
  }

  ~ShmFloorServer() override {
    stop_ = true;
    thread_.join();
  }

  int memfd() const override { return ping_.memfd(); }

 private:
  void run() {
    while (ping_.await_question(stop_)) {
      if (echoes_) {
        std::memcpy(message_.data(), ping_.request_area().data(), message_.size());
        std::memcpy(ping_.reply_area().data(), message_.data(), message_.size());
      }
      ping_.answer();
    }
  }

  ShmPing ping_;
  bool echoes_;
  std::vector<std::byte> message_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

Result<std::unique_ptr<FloorServer>> make_shm_server(const FloorRequest& request) {
  const std::uint64_t message = request.op == BenchOp::sendrecv ? request.workload.transfer_bytes() : 0;
  auto memory = SharedMemory::create("kvferry-floor", ShmPing::memory_bytes(message));
  if (!memory) return memory.status();
  return std::unique_ptr<FloorServer>(std::make_unique<ShmFloorServer>(std::move(*memory), request));
}

Result<std::unique_ptr<FloorServer>> make_tcp_server(const FloorRequest& request, std::span<std::byte> region,
                                                     const std::string& host) {
  auto listener = RawListener::open(host);
  if (!listener) return listener.status();
  return std::unique_ptr<FloorServer>(std::make_unique<TcpFloorServer>(std::move(*listener), request, region));
}

}  // namespace

Json to_json(const FloorRequest& request) {
  return {{"transport", request.transport},        {"op", to_string(request.op)},
          {"workload", to_json(request.workload)}, {"sockets", request.sockets},
          {"mode", to_string(request.mode)},       {"buffer_bytes", static_cast<std::uint64_t>(request.buffer_bytes)}};
}

Result<FloorRequest> floor_request_from(const Json& json) {
  FloorRequest request;
  request.transport = text_field(json, "transport");
  if (request.transport != "tcp" && request.transport != "shm") return bad_request("no floor for this transport");
  auto op = parse_op(text_field(json, "op"));
  if (!op) return op.status();
  auto workload = workload_from(json.value("workload", Json()));
  if (!workload) return workload.status();
  const auto sockets = number_field(json, "sockets");
  const auto buffer_bytes = number_field(json, "buffer_bytes");
  if (!sockets || *sockets == 0 || *sockets > max_sockets) return bad_request("sockets is not within 1 to 64");
  if (!buffer_bytes || *buffer_bytes > INT32_MAX) return bad_request("buffer_bytes is missing or too large");
  request.op = *op;
  request.workload = *workload;
  request.sockets = *sockets;
  request.mode = text_field(json, "mode") == to_string(RawMode::polled) ? RawMode::polled : RawMode::blocking;
  request.buffer_bytes = static_cast<int>(*buffer_bytes);
  return request;
}

Result<std::unique_ptr<FloorServer>> make_floor_server(const FloorRequest& request, std::span<std::byte> region,
                                                       const std::string& host) {
  if (request.workload.transfer_bytes() == 0) return bad_request("the workload moves nothing");
  if (request.workload.part_bytes() > region.size()) return bad_request("the workload is larger than the region");
  return request.transport == "shm" ? make_shm_server(request) : make_tcp_server(request, region, host);
}

std::vector<Slice> floor_slices(const Workload& workload) {
  std::vector<Slice> slices = make_slices(workload, 0);
  slices.resize(merge_slices(slices, slices.data()));
  return slices;
}

}  // namespace kvferry::bench
