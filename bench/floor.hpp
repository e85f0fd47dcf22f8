// The floor: the best raw way of this machine to move the same slices, measured in the same run.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/region.hpp>

#include "bench/control.hpp"
#include "bench/options.hpp"

namespace kvferry::bench {

/// One raw way. Moves the first part of the workload once a trip.
class Floor {
 public:
  virtual ~Floor() = default;
  /// "memcpy", "streaming", "blocking", "polled", "ping-pong".
  virtual std::string_view name() const = 0;
  virtual Status trip() = 0;
};

/// Where the two sides' memory is and how kvferry reaches the target.
struct FloorSetting {
  std::string transport;    ///< the one in use: "tcp" or "shm"
  std::string target_host;  ///< for sockets
  Region local;
  TargetRegion remote;
  std::size_t sockets = 1;  ///< as many as kvferry has to this peer
};

/// Every raw way that suits the case; the floor is the fastest of them. The control client must
/// outlive them.
Result<std::vector<std::unique_ptr<Floor>>> open_floors(ControlClient& control, const FloorSetting& setting,
                                                        const BenchCase& bench_case);

}  // namespace kvferry::bench
