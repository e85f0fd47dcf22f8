// The public face of kvferry: one engine per process (or several, for tests).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/metrics.hpp>
#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

class Transport;
struct PeerRecord;
struct RemoteRegion;

/// A connected engine, in one of its lives: after a restart it is another peer, and transfers that
/// name the old handle end with stale_peer. Cheap to copy; may outlive the engine.
class Peer {
 public:
  Peer() = default;
  explicit Peer(std::shared_ptr<PeerRecord> record) : record_(std::move(record)) {}
  explicit operator bool() const noexcept { return record_ != nullptr; }
  const std::string& name() const;
  std::uint64_t incarnation() const;
  /// "up over shm, tcp", "lost: ...", "stale: ...".
  std::string describe() const;
  const std::shared_ptr<PeerRecord>& record() const { return record_; }
  friend bool operator==(const Peer&, const Peer&) = default;

 private:
  std::shared_ptr<PeerRecord> record_;
};

/// A peer's region, looked up once: spares the name look-up on every transfer.
class RemoteHandle {
 public:
  RemoteHandle() = default;
  explicit RemoteHandle(std::shared_ptr<const RemoteRegion> region) : region_(std::move(region)) {}
  explicit operator bool() const noexcept { return region_ != nullptr; }
  const std::string& name() const;
  std::uint64_t size() const;  ///< bytes
  const std::shared_ptr<const RemoteRegion>& region() const { return region_; }

 private:
  std::shared_ptr<const RemoteRegion> region_;
};

/// A write_imm that arrived.
struct Notification {
  std::string peer;               ///< name of the writer
  std::uint64_t incarnation = 0;  ///< its life
  std::uint32_t immediate = 0;
};

struct RegisterOptions {
  Access access = Access::read_write;  ///< what every peer may do
  /// What leases may allow beside that. Without Access::write here or above, shared memory is sealed by the kernel
  /// against being written by anyone else.
  Access leasable = Access::none;
};

struct LeaseOptions {
  Access access = Access::write;  ///< what the peer may do: read, write or both
  Duration time{0};               ///< until the lease ends by itself; must be positive
};

/// Most ranges of one lease, after those that touch have been joined.
inline constexpr std::size_t max_lease_ranges = 262144;

/// The right of one peer to read or write parts of a region, with an end. A handle, cheap to copy; the lease
/// itself goes on until its time is over, it is revoked, or its region or engine ends.
class Lease {
 public:
  Lease() = default;
  explicit Lease(std::shared_ptr<const RegionRecord> record) : record_(std::move(record)) {}
  explicit operator bool() const noexcept { return record_ != nullptr; }
  /// What the holder uses as the name of a remote region. Not to be guessed by others.
  const std::string& name() const { return record_->name; }
  TimePoint end() const { return record_->lease->end; }
  const std::shared_ptr<const RegionRecord>& record() const { return record_; }

 private:
  std::shared_ptr<const RegionRecord> record_;
};

/// Owns the actors, the transports and the registered memory of one participant. All methods may be
/// called from any thread; none blocks on the network except connect, find_region and the waits,
/// each with a limit. Errors are returned, never thrown.
class Engine {
 public:
  /// Starts an engine; KVFERRY_* variables override `config`'s fields.
  static Result<Engine> start(EngineConfig config);
  /// The same with given transports instead of the built-in ones, best first.
  static Result<Engine> start(EngineConfig config, std::vector<std::shared_ptr<Transport>> transports);

  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  /// Ends every transfer (shutting_down), frees all registrations, returns within a second. In a callback of its own
  /// transfers it returns at once, and a thread of its own does the rest.
  ~Engine();

  const std::string& name() const;
  std::uint64_t incarnation() const;
  /// The control address that peers connect to, with the real port.
  const std::string& address() const;

  // ---- memory
  /// Registers memory that the caller owns and keeps valid until unregister_region or the engine's end.
  Result<Region> register_memory(std::string name, void* data, std::uint64_t bytes, RegisterOptions options = {});
  /// Allocates page-aligned zeroed memory that same-host peers can map (memfd), and registers it.
  Result<Region> allocate(std::string name, std::uint64_t bytes, RegisterOptions options = {});
  /// Withdraws a region and its leases: ends local transfers that use it (cancelled), refuses new work of peers
  /// (unknown_region) and returns once nothing of either touches it, within about 2 s.
  Status unregister_region(const Region& region);

  // ---- leases
  /// Lets one peer, and no other, use these bytes of a region for a time, whatever the region's own access is:
  /// register what is only to be leased with {.access = Access::none, .leasable = Access::write}. The peer reads and
  /// writes at the region's own offsets, under the lease's name. Anything else it does ends with access_denied.
  /// docs/kvcache.md says what each transport guarantees. Errors: invalid_argument, access_denied (the region is not
  /// leasable for that), out_of_bounds (a range leaves the region), unknown_region, too_large (more than
  /// max_lease_ranges).
  Result<Lease> lease(const Peer& peer, const Region& region, std::span<const ByteRange> ranges, LeaseOptions options);
  /// Ends a lease. Once this returns ok no byte is read or written under it any more; that takes about as long as
  /// the copy that is being made, at most about 2 s. Ok also when the lease has ended before: then it is quiet too.
  Status revoke(const Lease& lease);

  // ---- peers
  /// Connects to tcp://HOST:PORT. Several callers share one connection. Bounded by connect_timeout.
  Result<Peer> connect(const std::string& address);
  /// A peer that connected to this engine, by name; waits for it up to `limit`. It can be received
  /// from; reads and writes to it need a connect() of one's own.
  Result<Peer> accept(const std::string& name, Duration limit);
  /// Everything currently connected, in either direction.
  std::vector<Peer> peers() const;
  /// Ends the connection: transfers to the peer end with cancelled.
  void disconnect(const Peer& peer);
  /// Asks the peer for a region by name. Bounded by connect_timeout.
  Result<RemoteHandle> find_region(const Peer& peer, const std::string& name);

  // ---- one-sided operations. `slices` are copied before the call returns.
  Transfer read(const Peer& peer, const Region& local, std::string_view remote, std::span<const Slice> slices,
                TransferOptions options = {});
  Transfer write(const Peer& peer, const Region& local, std::string_view remote, std::span<const Slice> slices,
                 TransferOptions options = {});
  /// The immediate reaches the peer's next_notification once all the data is visible there; no
  /// slices at all is a pure notification.
  Transfer write_imm(const Peer& peer, const Region& local, std::string_view remote, std::span<const Slice> slices,
                     std::uint32_t immediate, TransferOptions options = {});
  Transfer read(const Peer& peer, const Region& local, const RemoteHandle& remote, std::span<const Slice> slices,
                TransferOptions options = {});
  Transfer write(const Peer& peer, const Region& local, const RemoteHandle& remote, std::span<const Slice> slices,
                 TransferOptions options = {});
  Transfer write_imm(const Peer& peer, const Region& local, const RemoteHandle& remote, std::span<const Slice> slices,
                     std::uint32_t immediate, TransferOptions options = {});

  /// The next write_imm from anyone; timed_out after `limit`.
  Result<Notification> next_notification(Duration limit);

  // ---- small messages, matched in order per peer
  /// Sends up to 64 KiB, copied before the call returns. Ends ok when the peer's engine holds the
  /// message; a send that timed out may still arrive.
  Transfer send(const Peer& peer, std::span<const std::byte> message, TransferOptions options = {});
  /// Receives the peer's next message into `buffer`, which the caller keeps valid until the end;
  /// Transfer::bytes() says how many came. A longer message ends with too_large and stays queued.
  Transfer recv(const Peer& peer, std::span<std::byte> buffer, TransferOptions options = {});

  Metrics metrics() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
