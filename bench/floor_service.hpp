// The target's half of the floor: answers raw traffic without kvferry.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "bench/control.hpp"
#include "bench/options.hpp"
#include "bench/raw_tcp.hpp"
#include "bench/workload.hpp"

namespace kvferry::bench {

/// What the initiator asks for.
struct FloorRequest {
  std::string transport;  ///< "tcp" or "shm"
  BenchOp op = BenchOp::read;
  Workload workload;
  std::size_t sockets = 1;
  RawMode mode = RawMode::blocking;
  int buffer_bytes = 0;  ///< of each socket, both ways; 0 leaves the kernel's tuning
};

Json to_json(const FloorRequest& request);
Result<FloorRequest> floor_request_from(const Json& json);

/// Serves on a thread of its own until destroyed.
class FloorServer {
 public:
  virtual ~FloorServer() = default;
  virtual int port() const { return 0; }
  virtual int memfd() const { return -1; }
};

/// `region` is the target's region and outlives the server; `host` is where a socket may listen.
Result<std::unique_ptr<FloorServer>> make_floor_server(const FloorRequest& request, std::span<std::byte> region,
                                                       const std::string& host);

/// The workload's slices of the first part, neighbours merged: what a raw program would move.
std::vector<Slice> floor_slices(const Workload& workload);

}  // namespace kvferry::bench
