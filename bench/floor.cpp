#include "bench/floor.hpp"

#include <cstring>

#include <fmt/core.h>

#include <kvferry/transports/shm/copy.hpp>

#include "bench/floor_service.hpp"
#include "bench/raw_tcp.hpp"
#include "bench/shm_ping.hpp"

namespace kvferry::bench {
namespace {

using Floors = std::vector<std::unique_ptr<Floor>>;

/// Asks for as much buffer as the kernel allows without privileges on most systems.
constexpr int socket_buffer_bytes = 4 << 20;

/// Closes the target's half together with this one.
class ServiceHandle {
 public:
  ServiceHandle(ControlClient& control, const FloorService& service) : control_(&control), service_(service) {}
  ServiceHandle(ServiceHandle&& other) noexcept
      : control_(std::exchange(other.control_, nullptr)), service_(other.service_) {}
  ~ServiceHandle() {
    // A target that has gone closed it already; the next question to it reports that.
    if (control_) (void)control_->close_floor(service_.id);
  }
  const FloorService& operator*() const { return service_; }

 private:
  ControlClient* control_;
  FloorService service_;
};

Result<ServiceHandle> open_service(ControlClient& control, const FloorRequest& request) {
  auto service = control.open_floor(request);
  if (!service) return service.status();
  return ServiceHandle(control, *service);
}

using CopyFunction = void (*)(std::span<const CopyPiece>);

void copy_cached(std::span<const CopyPiece> pieces) {
  for (const CopyPiece& piece : pieces) std::memcpy(piece.to, piece.from, piece.bytes);
}

void copy_streaming(std::span<const CopyPiece> pieces) { shm_copy(pieces, CopyKind::streaming); }

std::vector<CopyPiece> make_pieces(BenchOp op, std::span<const Slice> slices, std::byte* local, std::byte* remote) {
  std::vector<CopyPiece> pieces;
  pieces.reserve(slices.size());
  for (const Slice& slice : slices) {
    std::byte* here = local + slice.local_offset;
    std::byte* there = remote + slice.remote_offset;
    pieces.push_back(op == BenchOp::read ? CopyPiece{here, there, slice.length} : CopyPiece{there, here, slice.length});
  }
  return pieces;
}

/// Copies between the two regions with one thread.
class CopyFloor : public Floor {
 public:
  CopyFloor(std::string_view name, CopyFunction copy, std::shared_ptr<SharedMemory> remote,
            std::vector<CopyPiece> pieces)
      : name_(name), copy_(copy), remote_(std::move(remote)), pieces_(std::move(pieces)) {}

  std::string_view name() const override { return name_; }
  Status trip() override {
    copy_(pieces_);
    return Status::ok();
  }

 private:
  std::string_view name_;
  CopyFunction copy_;
  std::shared_ptr<SharedMemory> remote_;
  std::vector<CopyPiece> pieces_;
};

/// Copies, then tells the target's thread and waits for its word.
class SignalledCopyFloor : public Floor {
 public:
  SignalledCopyFloor(std::unique_ptr<Floor> copy, ServiceHandle service, SharedMemory words)
      : service_(std::move(service)), copy_(std::move(copy)), ping_(std::move(words)) {}

  std::string_view name() const override { return copy_->name(); }
  Status trip() override {
    if (auto status = copy_->trip(); !status) return status;
    return ping_.ask();
  }

 private:
  ServiceHandle service_;
  std::unique_ptr<Floor> copy_;
  ShmPing ping_;
};

/// Sends messages through shared memory and takes the echo.
class ShmEchoFloor : public Floor {
 public:
  ShmEchoFloor(ServiceHandle service, SharedMemory memory)
      : service_(std::move(service)), ping_(std::move(memory)), message_(ping_.request_area().size()) {}

  std::string_view name() const override { return "ping-pong"; }
  Status trip() override {
    std::memcpy(ping_.request_area().data(), message_.data(), message_.size());
    if (auto status = ping_.ask(); !status) return status;
    std::memcpy(message_.data(), ping_.reply_area().data(), message_.size());
    return Status::ok();
  }

 private:
  ServiceHandle service_;
  ShmPing ping_;
  std::vector<std::byte> message_;
};

class TcpFloor : public Floor {
 public:
  TcpFloor(ServiceHandle service, RawSockets sockets, const FloorRequest& request, std::span<std::byte> local)
      : service_(std::move(service)), sockets_(std::move(sockets)), op_(request.op), name_(to_string(request.mode)) {
    if (op_ == BenchOp::sendrecv) {
      message_.resize(request.workload.transfer_bytes());
      shares_.resize(1);
      shares_.front().add(message_.data(), message_.size());
    } else {
      shares_ = make_shares(local, floor_slices(request.workload), Side::local, request.sockets);
    }
  }
  ~TcpFloor() override { sockets_.shut_down(); }

  std::string_view name() const override { return name_; }

  Status trip() override {
    switch (op_) {
      case BenchOp::read:
        if (auto status = sockets_.send_signal(); !status) return status;
        return sockets_.transmit(shares_, Direction::receive);
      case BenchOp::write:
      case BenchOp::write_imm:
        if (auto status = sockets_.transmit(shares_, Direction::send); !status) return status;
        return sockets_.receive_signal();
      case BenchOp::sendrecv:
        if (auto status = sockets_.transmit(shares_, Direction::send); !status) return status;
        return sockets_.transmit(shares_, Direction::receive);
    }
    return {Errc::unsupported, "floor: no raw way for this operation"};
  }

 private:
  ServiceHandle service_;
  RawSockets sockets_;
  BenchOp op_;
  std::string_view name_;
  std::vector<Share> shares_;
  std::vector<std::byte> message_;
};

Result<std::unique_ptr<Floor>> open_tcp_floor(ControlClient& control, const FloorSetting& setting,
                                              const FloorRequest& request) {
  auto service = open_service(control, request);
  if (!service) return service.status();
  auto sockets =
      RawSockets::connect(setting.target_host, (**service).port, request.sockets, request.mode, request.buffer_bytes);
  if (!sockets) return sockets.status();
  return std::unique_ptr<Floor>(
      std::make_unique<TcpFloor>(std::move(*service), std::move(*sockets), request, setting.local.bytes()));
}

Result<Floors> open_tcp_floors(ControlClient& control, const FloorSetting& setting, const BenchCase& bench_case) {
  const std::size_t sockets = bench_case.op == BenchOp::sendrecv ? 1 : setting.sockets;
  Floors floors;
  for (const RawMode mode : {RawMode::blocking, RawMode::polled}) {
    auto floor = open_tcp_floor(control, setting,
                                {"tcp", bench_case.op, bench_case.workload, sockets, mode, socket_buffer_bytes});
    if (!floor) return floor.status();
    floors.push_back(std::move(*floor));
  }
  return floors;
}

Result<Floors> open_copy_floors(const FloorSetting& setting, const BenchCase& bench_case) {
  auto memory = SharedMemory::open(setting.remote.pid, setting.remote.memfd, bench_case.workload.region_bytes());
  if (!memory) return memory.status();
  auto remote = std::make_shared<SharedMemory>(std::move(*memory));
  const auto pieces =
      make_pieces(bench_case.op, floor_slices(bench_case.workload), setting.local.data(), remote->bytes().data());
  Floors floors;
  floors.push_back(std::make_unique<CopyFloor>("memcpy", copy_cached, remote, pieces));
  floors.push_back(std::make_unique<CopyFloor>("streaming", copy_streaming, remote, pieces));
  return floors;
}

/// The target's half for one shm floor, and the memory shared with it.
Result<std::pair<ServiceHandle, SharedMemory>> open_shm_service(ControlClient& control, const FloorSetting& setting,
                                                                const BenchCase& bench_case) {
  auto service = open_service(control, {"shm", bench_case.op, bench_case.workload});
  if (!service) return service.status();
  const std::uint64_t message = bench_case.op == BenchOp::sendrecv ? bench_case.workload.transfer_bytes() : 0;
  auto memory = SharedMemory::open(setting.remote.pid, (**service).memfd, ShmPing::memory_bytes(message));
  if (!memory) return memory.status();
  return std::pair(std::move(*service), std::move(*memory));
}

Result<Floors> add_signals(ControlClient& control, const FloorSetting& setting, const BenchCase& bench_case,
                           Floors copies) {
  Floors floors;
  for (auto& copy : copies) {
    auto half = open_shm_service(control, setting, bench_case);
    if (!half) return half.status();
    floors.push_back(
        std::make_unique<SignalledCopyFloor>(std::move(copy), std::move(half->first), std::move(half->second)));
  }
  return floors;
}

Result<Floors> open_shm_floors(ControlClient& control, const FloorSetting& setting, const BenchCase& bench_case) {
  if (bench_case.op == BenchOp::sendrecv) {
    auto half = open_shm_service(control, setting, bench_case);
    if (!half) return half.status();
    Floors floors;
    floors.push_back(std::make_unique<ShmEchoFloor>(std::move(half->first), std::move(half->second)));
    return floors;
  }
  auto copies = open_copy_floors(setting, bench_case);
  if (!copies || bench_case.op != BenchOp::write_imm) return copies;
  return add_signals(control, setting, bench_case, std::move(*copies));
}

}  // namespace

Result<Floors> open_floors(ControlClient& control, const FloorSetting& setting, const BenchCase& bench_case) {
  if (setting.transport == "shm") return open_shm_floors(control, setting, bench_case);
  if (setting.transport == "tcp") return open_tcp_floors(control, setting, bench_case);
  return Status(Errc::unsupported, fmt::format("there is no floor for transport {}", setting.transport));
}

}  // namespace kvferry::bench
