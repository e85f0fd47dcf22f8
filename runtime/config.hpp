// What an engine can be told. Every field can also be set by a KVFERRY_* variable.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/status.hpp>

namespace kvferry {

struct TcpConfig {
  int sockets = 4;                        ///< connections per rail, 1-64
  std::uint64_t chunk_bytes = 256 << 10;  ///< most bytes of one request, 4 KiB - 64 MiB; 8 are in flight per rail
  int socket_buffer_bytes = 1 << 20;      ///< asked of the kernel; 0 leaves its own tuning
};

struct ShmConfig {
  bool enabled = true;
  int copy_threads = 0;                 ///< helpers for large transfers, 0-64; 0 copies on the poller
  bool waiters_copy = true;             ///< whether threads in Transfer::wait take part in copying
  std::uint64_t chunk_bytes = 1 << 20;  ///< most bytes copied between two looks at the queues
  /// Batches of at least this many bytes are copied with streaming stores; 0 never.
  std::uint64_t streaming_bytes = 4 << 20;
};

/// How the queue pairs of two engines are connected.
enum class VerbsConnect : std::uint8_t {
  bootstrap,  ///< their numbers travel over the engines' control connection
  rdmacm      ///< by librdmacm, which finds the way between two IP addresses
};

/// How the name of it is written: "bootstrap", "rdmacm".
std::string_view to_string(VerbsConnect connect) noexcept;

struct VerbsConfig {
  bool enabled = true;
  /// Devices to use, best first, as "mlx5_0" or "mlx5_0:2"; empty: every active one.
  std::vector<std::string> devices = {};
  VerbsConnect connect = VerbsConnect::bootstrap;
  int queue_pairs = 2;                  ///< for data, per rail, 1-16
  int queue_depth = 256;                ///< requests in flight per queue pair, 16-16384
  std::uint64_t chunk_bytes = 1 << 20;  ///< larger slices are cut into these, 4 KiB - 64 MiB
  int gid_index = -1;                   ///< -1 chooses
  int mtu = 0;                          ///< most bytes of a packet, 256-4096; 0 takes the port's
  int timeout = 14;                     ///< 4.096 us x 2^timeout until a packet is repeated, 1-31
  int retries = 6;                      ///< repeats until the channel has failed, 0-7
  int rnr_timer = 12;                   ///< IBTA code of the wait for a receiver that is not ready, 1-31
  int traffic_class = 0;                ///< 0-255
  int service_level = 0;                ///< 0-15
  bool relaxed_ordering = false;        ///< lets PCIe reorder the writes of data
};

/// Fields have initializers even where they start empty, so that a designated initializer may leave
/// them out without a warning.
struct EngineConfig {
  std::string name = {};  ///< 1-255 printable characters; empty: made from host and pid
  /// Control address: tcp://HOST:PORT, port 0 takes a free one. The data port is chosen beside it.
  std::string listen = "tcp://127.0.0.1:0";
  /// Address that peers are told to connect their data sockets to; empty: the host of `listen`, or
  /// for a wildcard the address on which the peer reached this engine.
  std::string advertise = {};
  /// Transports to use, best first; empty means every one that is possible: "shm", "verbs", "tcp".
  std::vector<std::string> transports = {};
  int rails = 1;    ///< rails per peer and transport, 1-16
  int pollers = 1;  ///< poller threads (rail groups), 1-16

  std::chrono::milliseconds connect_timeout{5000};
  std::chrono::milliseconds transfer_timeout{30000};
  std::chrono::milliseconds heartbeat_interval{500};
  std::chrono::milliseconds peer_timeout{3000};  ///< silence after which a peer is lost
  std::chrono::milliseconds drain_grace{50};     ///< how long an ended transfer may drain before its channel is fenced
  std::chrono::microseconds poll_spin{100};      ///< how long an idle poller looks before it sleeps
  std::chrono::microseconds wait_spin{20};       ///< how long Transfer::wait looks before it sleeps
  std::uint64_t split_bytes = 64ull << 20;       ///< transfers of at least this size use several pollers

  TcpConfig tcp = {};
  ShmConfig shm = {};
  VerbsConfig verbs = {};

  // ---- CurveZMQ: encrypts the control connections and decides who may connect. Keys are the 40
  // characters of Z85 that curve_keygen prints.
  std::string curve_public_key = {};  ///< this engine's own pair; both or neither
  std::string curve_secret_key = {};
  /// Public keys of the peers that may connect. With an own pair and an empty list, nobody may.
  std::vector<std::string> curve_peer_keys = {};
  /// Public key that every peer this engine connects to must prove to hold; empty: it connects to
  /// peers without CurveZMQ.
  std::string curve_server_key = {};

  /// Overwrites every field whose variable is set (config_fields() lists them). A value that does not
  /// parse is an error naming the variable; the fields before it have been overwritten then.
  Status apply_environment();
  /// Refuses values out of range, naming the field, the value and the range.
  Status validate() const;
};

/// What documentation says of one field.
struct ConfigField {
  std::string name;      ///< as written in C++, such as "tcp.sockets"
  std::string variable;  ///< environment variable
  std::string range;     ///< values that are allowed, with their unit
  std::string fallback;  ///< the default, as the variable would be set to it
  std::string text;      ///< what it does
};

/// Every field of EngineConfig, in its order.
std::vector<ConfigField> config_fields();

}  // namespace kvferry
