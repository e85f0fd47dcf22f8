// What an engine can be told. Every field can also be set by a KVFERRY_* variable.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <kvferry/runtime/status.hpp>

namespace kvferry {

struct TcpConfig {
  int sockets = 4;                      ///< connections per rail, 1-64
  std::uint64_t chunk_bytes = 1 << 20;  ///< most bytes of one request, 4 KiB - 64 MiB
  int socket_buffer_bytes = 4 << 20;    ///< asked of the kernel; 0 leaves its own tuning
};

struct ShmConfig {
  bool enabled = true;
  int copy_threads = 0;                 ///< helpers for large transfers, 0-64; 0 copies on the poller
  std::uint64_t chunk_bytes = 1 << 20;  ///< most bytes copied between two looks at the queues
  /// Batches of at least this many bytes are copied with streaming stores; 0 never.
  std::uint64_t streaming_bytes = 4 << 20;
};

struct EngineConfig {
  std::string name;  ///< 1-255 printable characters; empty: made from host and pid
  /// Control address: tcp://HOST:PORT, port 0 takes a free one. The data port is chosen beside it.
  std::string listen = "tcp://127.0.0.1:0";
  /// Address that peers are told to connect their data sockets to; empty: the host of `listen`, or
  /// for a wildcard the address on which the peer reached this engine.
  std::string advertise;
  /// Transports to use, best first; empty means every one that is possible: "shm", "tcp".
  std::vector<std::string> transports;
  int rails = 1;    ///< rails per peer and transport, 1-16
  int pollers = 1;  ///< poller threads (rail groups), 1-16

  std::chrono::milliseconds connect_timeout{5000};
  std::chrono::milliseconds transfer_timeout{30000};
  std::chrono::milliseconds heartbeat_interval{500};
  std::chrono::milliseconds peer_timeout{3000};  ///< silence after which a peer is lost
  std::chrono::milliseconds drain_grace{50};     ///< how long an ended transfer may drain before its channel is fenced
  std::chrono::microseconds poll_spin{50};       ///< how long an idle poller looks before it sleeps
  std::chrono::microseconds wait_spin{20};       ///< how long Transfer::wait looks before it sleeps
  std::uint64_t split_bytes = 64ull << 20;       ///< transfers of at least this size use several pollers

  TcpConfig tcp;
  ShmConfig shm;

  /// Overwrites fields from KVFERRY_NAME, KVFERRY_LISTEN, KVFERRY_TRANSPORTS, KVFERRY_RAILS, ...
  /// (docs/configuration.md lists all). A value that does not parse is an error naming the variable.
  Status apply_environment();
  /// Refuses values out of range, naming the field, the value and the range.
  Status validate() const;
};

}  // namespace kvferry
