#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <future>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zmq.hpp>

#include <kvferry/actors/bootstrap.hpp>
#include <kvferry/actors/callbacks.hpp>
#include <kvferry/actors/endpoint.hpp>
#include <kvferry/actors/engine.hpp>
#include <kvferry/actors/leases.hpp>
#include <kvferry/actors/poller.hpp>
#include <kvferry/actors/scheduler.hpp>
#include <kvferry/actors/split_transfer.hpp>
#include <kvferry/runtime/host.hpp>
#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/shm/shm_transport.hpp>
#include <kvferry/transports/tcp/tcp_transport.hpp>
#if KVFERRY_HAS_VERBS
#include <kvferry/transports/verbs/verbs_transport.hpp>
#endif

namespace kvferry {
namespace {

const Status& shutting_down() {
  static const Status status(Errc::shutting_down, "the engine is being destroyed");
  return status;
}

struct ControlAddress {
  std::string host;
  std::string port;
};

Result<ControlAddress> parse_address(const std::string& address) {
  const std::string_view scheme = "tcp://";
  const auto colon = address.rfind(':');
  if (!address.starts_with(scheme) || colon == std::string::npos || colon < scheme.size() + 1)
    return {Errc::invalid_argument, fmt::format("address '{}' is not of the form tcp://HOST:PORT", address)};
  ControlAddress parsed{address.substr(scheme.size(), colon - scheme.size()), address.substr(colon + 1)};
  if (parsed.host.starts_with('[') && parsed.host.ends_with(']'))
    parsed.host = parsed.host.substr(1, parsed.host.size() - 2);
  const bool digits =
      !parsed.port.empty() && parsed.port.size() <= 5 &&
      std::all_of(parsed.port.begin(), parsed.port.end(), [](unsigned char c) { return std::isdigit(c); });
  if (!digits || std::stoi(parsed.port) > 65535)
    return {Errc::invalid_argument, fmt::format("address '{}': '{}' is not a port number", address, parsed.port)};
  return parsed;
}

bool is_numeric(const std::string& host) {
  in6_addr scratch;
  return ::inet_pton(AF_INET, host.c_str(), &scratch) == 1 || ::inet_pton(AF_INET6, host.c_str(), &scratch) == 1;
}

// The resolver has no limit of its own, so a thread that may outlive the call waits for it.
Result<std::string> resolve(const std::string& host, Duration limit) {
  if (is_numeric(host)) return host;
  auto promise = std::make_shared<std::promise<Result<std::string>>>();
  auto answer = promise->get_future();
  std::thread([promise, host] {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
    if (error != 0) {
      promise->set_value(
          Status(Errc::unreachable, fmt::format("host name '{}' does not resolve: {}", host, ::gai_strerror(error))));
      return;
    }
    char text[NI_MAXHOST] = {};
    ::getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    ::freeaddrinfo(found);
    promise->set_value(std::string(text));
  }).detach();
  if (answer.wait_for(limit) != std::future_status::ready)
    return {Errc::unreachable, fmt::format("host name '{}' was not resolved in time", host)};
  return answer.get();
}

std::string tcp_address(const std::string& host, const std::string& port) {
  return host.find(':') == std::string::npos ? fmt::format("tcp://{}:{}", host, port)
                                             : fmt::format("tcp://[{}]:{}", host, port);
}

std::string default_name() {
  char host[256] = "engine";
  ::gethostname(host, sizeof host - 1);
  return fmt::format("{}-{}", host, ::getpid());
}

Status check_slices(std::span<const Slice> slices, const RegionRecord& local, const RemoteRegion& remote, Op op) {
  const Access need = op == Op::read ? Access::read : Access::write;
  if (!allows(remote.access, need))
    return {Errc::access_denied, fmt::format("region '{}' of the peer does not allow {}", remote.name,
                                             op == Op::read ? "reading" : "writing")};
  std::size_t hint = 0;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const Slice& slice = slices[i];
    if (!fits(slice.local_offset, slice.length, local.size))
      return {Errc::out_of_bounds,
              fmt::format("slice {}: offset {} + length {} leaves the local region '{}' of {} bytes", i,
                          slice.local_offset, slice.length, local.name, local.size)};
    if (remote.lease && !remote.lease->covers(slice.remote_offset, slice.length, hint))
      return {Errc::access_denied, fmt::format("slice {}: remote offset {} + length {} leaves what is leased", i,
                                               slice.remote_offset, slice.length)};
    if (!fits(slice.remote_offset, slice.length, remote.size))
      return {Errc::out_of_bounds,
              fmt::format("slice {}: offset {} + length {} leaves the peer's region '{}' of {} bytes", i,
                          slice.remote_offset, slice.length, remote.name, remote.size)};
  }
  return {};
}

std::uint64_t bytes_of(std::span<const Slice> slices) {
  std::uint64_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.length;
  return bytes;
}

/// Callbacks, leases and bootstrap; CAF's worker, clock, printer and spawner; two of ZeroMQ; one for a name look-up.
constexpr int threads_beside_pollers = 10;

Status check_options(const TransferOptions& options) {
  if (options.deadline < Duration::zero()) return {Errc::invalid_argument, "a transfer's deadline can not be negative"};
  if (options.priority > Priority::background)
    return {Errc::invalid_argument, fmt::format("{} is no priority", static_cast<unsigned>(options.priority))};
  return {};
}

// An actor whose thread can not be created leaves its system waiting for it for ever, and ZeroMQ aborts: so the lack
// of threads has to be found out before.
Status check_threads(int count) {
  std::promise<void> enough;
  const std::shared_future<void> go(enough.get_future());
  std::vector<std::thread> threads;
  Status status;
  try {
    for (int i = 0; i < count; ++i)
      threads.emplace_back([go] {
        ::operator delete(::operator new(1));  // takes the address space of the C library's heap for this thread
        go.wait();
      });
  } catch (const std::exception& e) {
    status = {Errc::resource_exhausted,
              fmt::format("an engine needs up to {} threads, and only {} could be created ({}): raise the limit of "
                          "threads or of address space (ulimit -u, ulimit -v, the container's pids limit)",
                          count, threads.size(), e.what())};
  }
  enough.set_value();
  for (std::thread& thread : threads) thread.join();
  return status;
}

// Fails where a page is not mapped. Touches none.
Status check_mapped(const std::string& name, const std::byte* data, std::uint64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = address / page * page;
  const std::uintptr_t length = address - begin + bytes;
  // Past the end of the address space the region table says so.
  if (length < bytes || length > UINTPTR_MAX - begin) return {};
  if (::msync(reinterpret_cast<void*>(begin), length, MS_ASYNC) == 0 || errno != ENOMEM) return {};
  return {Errc::invalid_argument, fmt::format("region '{}': not all of the {} bytes at {} are mapped in this process",
                                              name, bytes, fmt::ptr(data))};
}

/// Through a network a transfer of so many bytes is not over before a spinning waiter gives up, who until then
/// only keeps a core from the two pollers.
constexpr std::uint64_t bytes_worth_sleeping = 256 << 10;

// About how long one core copies these slices: waiting that long by spinning saves the wake-up.
Duration copy_time(std::span<const Slice> slices) {
  constexpr std::uint64_t bytes_per_microsecond = 8000;
  constexpr std::chrono::microseconds longest(200);
  return std::chrono::microseconds(std::min<std::uint64_t>(bytes_of(slices) / bytes_per_microsecond, longest.count()));
}

Result<std::shared_ptr<Transport>> make_verbs([[maybe_unused]] const VerbsConfig& config) {
#if KVFERRY_HAS_VERBS
  return make_verbs_transport(config);
#else
  return {Errc::unsupported,
          "this kvferry was built without RDMA (KVFERRY_WITH_VERBS): install libibverbs-dev and librdmacm-dev, and "
          "build it again"};
#endif
}

Result<std::vector<std::shared_ptr<Transport>>> built_in_transports(const EngineConfig& config) {
  std::vector<std::string> names = config.transports;
  const bool automatic = names.empty();
  if (automatic) {
    if (config.shm.enabled) names.emplace_back("shm");
    if (config.verbs.enabled) names.emplace_back("verbs");
    names.emplace_back("tcp");
  }
  std::vector<std::shared_ptr<Transport>> transports;
  for (const auto& name : names) {
    if (name == "shm") transports.push_back(make_shm_transport(config.shm));
    if (name == "tcp") transports.push_back(make_tcp_transport(config.tcp));
    if (name != "verbs") continue;
    auto verbs = make_verbs(config.verbs);
    if (verbs) {
      transports.push_back(std::move(*verbs));
    } else if (!automatic || !config.verbs.devices.empty()) {
      return verbs.status();
    } else {
      log(LogLevel::debug, fmt::format("without RDMA: {}", verbs.status().text()));
    }
  }
  return transports;
}

}  // namespace

// ---------------------------------------------------------------- handles

const std::string& Peer::name() const { return record_->name; }
std::uint64_t Peer::incarnation() const { return record_->incarnation; }
std::string Peer::describe() const { return record_->describe(); }
const std::string& RemoteHandle::name() const { return region_->name; }
std::uint64_t RemoteHandle::size() const { return region_->size; }

// ---------------------------------------------------------------- the engine

namespace {

// Of the engine that this thread belongs to, or null.
thread_local const caf::actor_system* system_of_thread = nullptr;

class MarkThreads final : public caf::thread_hook {
 public:
  void init(caf::actor_system& system) override { system_ = &system; }
  void thread_started() override { system_of_thread = system_; }
  void thread_terminates() override { system_of_thread = nullptr; }

 private:
  const caf::actor_system* system_ = nullptr;
};

}  // namespace

class Engine::Impl {
 public:
  Impl(EngineConfig config, std::vector<std::shared_ptr<Transport>> transports)
      : config_(std::move(config)),
        incarnation_(random_u64()),
        peers_(incarnation_),
        transports_(std::move(transports)) {}
  ~Impl() { stop(); }

  Status start();
  void stop();
  /// Whether this thread is one of the engine's own, as in a callback.
  bool owns_this_thread() const { return system_ && system_of_thread == system_.get(); }

  Result<Region> register_memory(std::unique_ptr<RegionRecord> record);
  Status unregister_region(const Region& region);
  Result<Lease> lease(const Peer& peer, const Region& region, std::span<const ByteRange> ranges,
                      const LeaseOptions& options);
  Status revoke(const Lease& lease);

  Result<Peer> connect(const std::string& address);
  Result<Peer> accept(const std::string& name, Duration limit);
  void disconnect(const Peer& peer);
  Result<RemoteHandle> find_region(const Peer& peer, const std::string& name);

  Transfer submit(Op op, const Peer& peer, const Region& local, std::string_view name,
                  std::shared_ptr<const RemoteRegion> remote, std::span<const Slice> slices, std::uint32_t immediate,
                  const TransferOptions& options);
  Transfer send(const Peer& peer, std::span<const std::byte> message, const TransferOptions& options);
  Transfer recv(const Peer& peer, std::span<std::byte> buffer, const TransferOptions& options);

  const EngineConfig& config() const { return config_; }
  std::uint64_t incarnation() const { return incarnation_; }
  const std::string& address() const { return address_; }
  PeerTable& peers() { return peers_; }
  NotificationQueue& notifications() { return notifications_; }
  const MetricCounters& counters() const { return metrics_; }

 private:
  struct Group {
    std::shared_ptr<Submissions> submissions;
    std::unique_ptr<ReportToScheduler> report;
    caf::actor actor;
  };

  Status release(const RegionRecord& region);
  void start_system();
  Status start_groups(const std::string& listen_host, std::vector<PortAdvert>& adverts);
  void start_bootstrap(ControlListener listener, std::vector<PortAdvert> adverts);
  caf::actor endpoint_for(const std::string& address, const std::string& host);
  caf::actor find_endpoint(const std::string& address);
  Status check_peer(const Peer& peer) const;
  TransferState::Request request(Op op, const TransferOptions& options) const;
  Transfer hand_over(RefPtr<TransferState> state, const Peer& peer, std::string region);
  void launch(RefPtr<TransferState> state, PeerRecord& peer);
  void push(RefPtr<TransferState> state, PeerRecord& peer, std::uint32_t group);
  Transfer refused(Status status);
  std::vector<std::pair<std::string, std::string>> descriptors(RegionKey key) const;

  EngineConfig config_;
  const std::uint64_t incarnation_;
  std::string address_;
  std::string advertise_host_;
  HostFacts facts_;
  MetricCounters metrics_;
  RegionTable regions_;
  PeerTable peers_;
  NotificationQueue notifications_;
  std::vector<std::shared_ptr<Transport>> transports_;
  CallbackRunner callbacks_;
  Leases leases_{regions_, [this](const RegionRecord& region) { return release(region); }};

  mutable std::mutex descriptors_mutex_;
  std::map<std::uint64_t, std::vector<std::pair<std::string, std::string>>> descriptors_;

  std::atomic<bool> stopping_{false};
  zmq::context_t context_{1};
  caf::actor_system_config system_config_;
  std::unique_ptr<caf::actor_system> system_;
  caf::actor scheduler_;
  caf::actor bootstrap_;
  std::vector<Group> groups_;
  std::vector<std::vector<PortAdvert>> group_ports_;  ///< by group
  std::shared_ptr<TransferOwner> owner_;              ///< of transfers: reaches every group
  std::mutex endpoints_mutex_;
  std::map<std::string, caf::actor> endpoints_;
  std::uint64_t next_line_ = 1;
};

// ---------------------------------------------------------------- start and stop

Status Engine::Impl::start() {
  if (Status status = config_.apply_environment(); !status.is_ok()) return status;
  if (Status status = config_.validate(); !status.is_ok()) return status;
  if (config_.name.empty()) config_.name = default_name();
  if (Status status = check_threads(config_.pollers + threads_beside_pollers); !status.is_ok()) return status;
  if (transports_.empty()) {
    auto built_in = built_in_transports(config_);
    if (!built_in) return built_in.status();
    transports_ = std::move(*built_in);
  }
  facts_ = local_host();

  const auto listen = parse_address(config_.listen);
  if (!listen) return listen.status();
  const std::string listen_host = listen->host == "*" ? "0.0.0.0" : listen->host;
  const auto numeric = resolve(listen_host, config_.connect_timeout);
  if (!numeric) return numeric.status().with_context("listen");
  const CurveKeys keys{config_.curve_public_key, config_.curve_secret_key, config_.curve_server_key,
                       config_.curve_peer_keys};
  auto listener = ControlListener::bind(context_, tcp_address(*numeric, listen->port), keys);
  if (!listener) return listener.status();
  address_ = listener->address();
  const bool wildcard = *numeric == "0.0.0.0" || *numeric == "::";
  advertise_host_ = !config_.advertise.empty() ? config_.advertise : wildcard ? std::string() : *numeric;

  start_system();
  std::vector<PortAdvert> adverts;
  if (Status status = start_groups(*numeric, adverts); !status.is_ok()) return status;
  start_bootstrap(std::move(*listener), std::move(adverts));
  log(LogLevel::info, fmt::format("engine '{}' listens on {}", config_.name, address_));
  return {};
}

void Engine::Impl::start_system() {
  // One worker carries endpoints and scheduler; short spins, since neither is on a batch's path.
  system_config_.set("scheduler.max-threads", std::size_t{1});
  system_config_.set("work-stealing.moderate-poll-attempts", std::size_t{0});
  system_config_.set("work-stealing.aggressive-poll-attempts", std::size_t{100});
  // It is woken for every message; the default of 10 ms looks in vain a hundred times a second.
  system_config_.set("work-stealing.relaxed-sleep-duration", caf::timespan(std::chrono::seconds(1)));
  system_config_.add_thread_hook<MarkThreads>();
  system_ = std::make_unique<caf::actor_system>(system_config_);
  callbacks_.start(*system_);
  leases_.start(*system_);
  scheduler_ = system_->spawn<SchedulerActor>(Duration(config_.connect_timeout));
}

Status Engine::Impl::start_groups(const std::string& listen_host, std::vector<PortAdvert>& adverts) {
  SetGroups set;
  std::vector<std::shared_ptr<Submissions>> submissions;
  std::vector<std::unique_ptr<PollerCore>> cores;
  for (int i = 0; i < config_.pollers; ++i) {
    Group group;
    group.submissions =
        std::make_shared<Submissions>([this](std::function<void()> task) { callbacks_.run(std::move(task)); });
    group.report = std::make_unique<ReportToScheduler>(scheduler_, static_cast<std::uint32_t>(i));
    PollerCore::Parts parts;
    parts.group = static_cast<std::uint32_t>(i);
    parts.groups = static_cast<std::uint32_t>(config_.pollers);
    parts.config = &config_;
    parts.peers = &peers_;
    parts.notifications = &notifications_;
    parts.regions = &regions_;
    parts.metrics = &metrics_;
    parts.submissions = group.submissions.get();
    parts.events = group.report.get();
    // Receives are matched by group 0.
    auto first = i == 0 ? group.submissions : groups_.front().submissions;
    auto core = std::make_unique<PollerCore>(parts, [first] { first->ring(); });
    for (const auto& transport : transports_) {
      PortContext context;
      context.regions = &regions_;
      context.incarnation = incarnation_;
      context.listen_host = listen_host;
      if (Status status = core->add_port(*transport, context); !status.is_ok()) return status;
    }
    group_ports_.push_back(core->adverts());
    adverts.insert(adverts.end(), group_ports_.back().begin(), group_ports_.back().end());
    cores.push_back(std::move(core));
    submissions.push_back(group.submissions);
    groups_.push_back(std::move(group));
  }
  owner_ = submissions.size() == 1 ? std::static_pointer_cast<TransferOwner>(submissions.front())
                                   : std::make_shared<SharedOwner>(std::move(submissions));
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    groups_[i].actor = system_->spawn<PollerActor, caf::detached>(std::move(cores[i]), groups_[i].submissions,
                                                                  Duration(config_.poll_spin));
    set.groups.push_back({groups_[i].actor, groups_[i].submissions});
  }
  caf::anon_send(scheduler_, std::move(set));
  return {};
}

void Engine::Impl::start_bootstrap(ControlListener listener, std::vector<PortAdvert> adverts) {
  BootstrapService::Parts parts;
  parts.identity = {config_.name, incarnation_, facts_.host_id, advertise_host_};
  parts.peers = &peers_;
  parts.regions = &regions_;
  parts.metrics = &metrics_;
  parts.descriptors = [this](RegionKey key) { return descriptors(key); };
  parts.serve_port = [this](const ChannelMessage& message, std::function<void(Result<std::string>)> answer) {
    for (std::size_t i = 0; i < groups_.size(); ++i)
      for (const PortAdvert& advert : group_ports_[i])
        if (advert.transport == message.transport && advert.address == message.address)
          return caf::anon_send(groups_[i].actor,
                                ServePort{message.transport, message.address, message.request, std::move(answer)});
    answer(Status(Errc::unreachable, "no port has that address"));
  };
  parts.drop_session = [this](SessionId session, const Status& why) {
    const auto slot = static_cast<std::uint32_t>(session);
    for (const Group& group : groups_) caf::anon_send(group.actor, DropSession{session});
    const auto peer = peers_.find_slot(slot);
    if (!peer || peer->state.load() != PeerState::inbound) return;
    peer->set_state(PeerState::closed, why);
    for (const Group& group : groups_) caf::anon_send(group.actor, ClosePeer{slot, why});
    peers_.remove(slot);
  };
  auto service = std::make_shared<BootstrapService>(std::move(parts));
  service->set_ports(std::move(adverts));
  const CurveKeys keys{config_.curve_public_key, config_.curve_secret_key, config_.curve_server_key,
                       config_.curve_peer_keys};
  bootstrap_ = system_->spawn<BootstrapActor, caf::detached>(&context_, std::move(listener), std::move(service), keys,
                                                             Duration(config_.peer_timeout * 4));
}

// From the outside in: whoever hands work over ends before whoever carries it out.
void Engine::Impl::stop() {
  if (stopping_.exchange(true)) return;
  notifications_.close();
  peers_.close();
  if (!system_) return;
  {
    caf::scoped_actor self{*system_};
    std::vector<caf::actor> endpoints;
    {
      const std::lock_guard lock(endpoints_mutex_);
      for (auto& [address, endpoint] : endpoints_) endpoints.push_back(std::move(endpoint));
      endpoints_.clear();
    }
    for (const auto& endpoint : endpoints) caf::anon_send(endpoint, StopEndpoint{shutting_down()});
    for (const auto& endpoint : endpoints) self->wait_for(endpoint);
    endpoints.clear();
    leases_.stop(self);
    if (bootstrap_) {
      caf::anon_send(bootstrap_, StopBootstrap{});
      self->wait_for(bootstrap_);
      bootstrap_ = nullptr;
    }
    for (const Group& group : groups_)
      if (group.actor) caf::anon_send(group.actor, StopPoller{shutting_down()});
    for (Group& group : groups_) {
      if (group.actor) self->wait_for(group.actor);
      group.actor = nullptr;
    }
    if (scheduler_) {
      caf::anon_send(scheduler_, StopScheduler{});
      self->wait_for(scheduler_);
      scheduler_ = nullptr;
    }
  }
  callbacks_.stop();
  groups_.clear();
  system_.reset();
}

// ---------------------------------------------------------------- memory

Result<Region> Engine::Impl::register_memory(std::unique_ptr<RegionRecord> record) {
  if (stopping_) return shutting_down();
  auto added = regions_.add(std::move(record));
  if (!added) return added.status();
  std::vector<std::pair<std::string, std::string>> given;
  for (const auto& transport : transports_) {
    auto descriptor = transport->register_region(**added);
    if (!descriptor) {
      for (const auto& before : transports_) {
        if (before == transport) break;
        before->unregister_region(**added);
      }
      static_cast<void>(regions_.retire((*added)->key));
      regions_.erase((*added)->key);
      return descriptor.status().with_context(
          fmt::format("registering '{}' with transport '{}'", (*added)->name, transport->name()));
    }
    given.emplace_back(transport->name(), std::move(*descriptor));
  }
  const RegionKey key = (*added)->key;
  const std::lock_guard lock(descriptors_mutex_);
  descriptors_[(std::uint64_t{key.generation} << 32) | key.slot] = std::move(given);
  return Region(std::move(*added));
}

std::vector<std::pair<std::string, std::string>> Engine::Impl::descriptors(RegionKey key) const {
  const std::lock_guard lock(descriptors_mutex_);
  const auto found = descriptors_.find((std::uint64_t{key.generation} << 32) | key.slot);
  return found == descriptors_.end() ? std::vector<std::pair<std::string, std::string>>{} : found->second;
}

Status Engine::Impl::unregister_region(const Region& region) {
  if (!region) return {Errc::invalid_argument, "the region handle is empty"};
  if (stopping_) return shutting_down();
  const RegionKey key = region.record()->key;
  if (regions_.find(key) != region.record().get())
    return {Errc::unknown_region,
            fmt::format("region '{}' is not registered with this engine (any more)", region.name())};
  if (region.record()->lease) return {Errc::invalid_argument, fmt::format("'{}' is a lease: revoke it", region.name())};
  if (Status status = regions_.retire(key); !status.is_ok()) return status;
  // From here on nobody gets a new lease of it.
  if (Status status = leases_.end_all_of(*region.record()); !status.is_ok()) return status;
  return release(*region.record());
}

// Makes a retired region quiet and forgets it.
Status Engine::Impl::release(const RegionRecord& region) {
  const RegionKey key = region.key;
  std::vector<std::future<void>> answers;
  for (const Group& group : groups_) {
    auto done = std::make_shared<std::promise<void>>();
    answers.push_back(done->get_future());
    caf::anon_send(group.actor, ReleaseRegion{key, done});
  }
  bool quiet = true;
  const TimePoint limit = Clock::now() + std::chrono::seconds(5);
  for (auto& answer : answers) quiet &= answer.wait_until(limit) == std::future_status::ready;
  if (!quiet)
    return {Errc::internal,
            fmt::format("region '{}' could not be made quiet within 5 s: keep its memory", region.name)};
  for (const auto& transport : transports_) transport->unregister_region(region);
  {
    const std::lock_guard lock(descriptors_mutex_);
    descriptors_.erase((std::uint64_t{key.generation} << 32) | key.slot);
  }
  regions_.erase(key);
  return {};
}

// ---------------------------------------------------------------- leases

Result<Lease> Engine::Impl::lease(const Peer& peer, const Region& region, std::span<const ByteRange> ranges,
                                  const LeaseOptions& options) {
  if (Status status = check_peer(peer); !status.is_ok()) return status;
  if (!region) return {Errc::invalid_argument, "leasing: the region handle is empty"};
  const RegionRecord& leased = *region.record();
  if (options.access == Access::none || options.time <= Duration::zero())
    return {
        Errc::invalid_argument,
        fmt::format("leasing region '{}': a lease needs an access other than none and a time above 0", leased.name)};
  const auto may = static_cast<Access>(static_cast<unsigned>(leased.access) | static_cast<unsigned>(leased.leasable));
  if (!allows(may, options.access))
    return {Errc::access_denied, fmt::format("leasing region '{}': register it with RegisterOptions::leasable for what "
                                             "the lease is to allow",
                                             leased.name)};
  for (std::size_t i = 0; i < ranges.size(); ++i)
    if (!fits(ranges[i].offset, ranges[i].length, leased.size))
      return {Errc::out_of_bounds,
              fmt::format("leasing region '{}': range {}, {} bytes at offset {}, leaves its {} bytes", leased.name, i,
                          ranges[i].length, ranges[i].offset, leased.size)};
  auto terms = std::make_unique<LeaseTerms>();
  terms->region = region.record();
  terms->holder = peer.record()->slot;
  terms->ranges = RangeSet({ranges.begin(), ranges.end()});
  const TimePoint now = Clock::now();
  terms->end = options.time < TimePoint::max() - now ? now + options.time : TimePoint::max();
  const std::size_t count = terms->ranges.ranges().size();
  if (count == 0) return {Errc::invalid_argument, fmt::format("leasing region '{}': no bytes are named", leased.name)};
  if (count > max_lease_ranges)
    return {Errc::too_large, fmt::format("leasing region '{}': {} separate ranges, at most {} are possible: lease in "
                                         "parts, or fewer layers at a time",
                                         leased.name, count, max_lease_ranges)};
  auto record = std::make_unique<RegionRecord>();
  record->name = fmt::format("lease-{:016x}{:016x}", random_u64(), random_u64());
  record->data = leased.data;
  record->size = leased.size;
  record->kind = leased.kind;
  record->access = options.access;
  record->memfd = leased.memfd;
  record->lease = std::move(terms);
  auto added = register_memory(std::move(record));
  if (!added) return added.status();
  leases_.add(added->record());
  return Lease(added->record());
}

Status Engine::Impl::revoke(const Lease& lease) {
  if (!lease) return {Errc::invalid_argument, "revoking: the lease handle is empty"};
  if (stopping_) return shutting_down();
  return leases_.end(lease.record()->key);
}

// ---------------------------------------------------------------- peers

caf::actor Engine::Impl::endpoint_for(const std::string& address, const std::string& host) {
  const std::lock_guard lock(endpoints_mutex_);
  caf::actor& endpoint = endpoints_[address];
  if (!endpoint) {
    EndpointActor::Parts parts;
    parts.line = next_line_++;
    parts.address = address;
    parts.host = host;
    parts.name = config_.name;
    parts.incarnation = incarnation_;
    parts.facts = facts_;
    parts.config = &config_;
    parts.peers = &peers_;
    parts.transports = transports_;
    parts.bootstrap = bootstrap_;
    parts.scheduler = scheduler_;
    parts.launch = [this](RefPtr<TransferState> state, PeerRecord& peer) { launch(std::move(state), peer); };
    endpoint = system_->spawn<EndpointActor>(std::move(parts));
  }
  return endpoint;
}

caf::actor Engine::Impl::find_endpoint(const std::string& address) {
  const std::lock_guard lock(endpoints_mutex_);
  const auto found = endpoints_.find(address);
  return found == endpoints_.end() ? caf::actor() : found->second;
}

Result<Peer> Engine::Impl::connect(const std::string& address) {
  if (stopping_) return shutting_down();
  const auto parsed = parse_address(address);
  if (!parsed) return parsed.status();
  if (parsed->port == "0")
    return {Errc::invalid_argument, fmt::format("address '{}': port 0 can be listened on, not connected to", address)};
  const auto host = resolve(parsed->host, config_.connect_timeout);
  if (!host) return host.status().with_context(fmt::format("connecting to {}", address));
  auto answer = std::make_shared<std::promise<Result<PeerPtr>>>();
  auto future = answer->get_future();
  caf::anon_send(endpoint_for(tcp_address(*host, parsed->port), *host), ConnectRequest{answer});
  // The endpoint keeps the real limit; this one only guards against a defect.
  if (future.wait_for(config_.connect_timeout * 2 + std::chrono::seconds(1)) != std::future_status::ready)
    return {Errc::internal, fmt::format("connecting to {} got no answer from its endpoint", address)};
  auto result = future.get();
  if (!result) return result.status();
  return Peer(std::move(*result));
}

Result<Peer> Engine::Impl::accept(const std::string& name, Duration limit) {
  if (auto record = peers_.wait_for_session(name, limit)) return Peer(std::move(record));
  if (stopping_) return shutting_down();
  return {Errc::timed_out, fmt::format("no engine named '{}' connected in time", name)};
}

void Engine::Impl::disconnect(const Peer& peer) {
  if (!check_peer(peer).is_ok() || stopping_) return;
  if (auto endpoint = find_endpoint(peer.record()->address())) caf::anon_send(endpoint, Disconnect{peer.record()});
}

Result<RemoteHandle> Engine::Impl::find_region(const Peer& peer, const std::string& name) {
  if (Status status = check_peer(peer); !status.is_ok()) return status;
  if (name.empty()) return {Errc::invalid_argument, "find_region() needs a region's name, this one is empty"};
  auto endpoint = find_endpoint(peer.record()->address());
  if (!endpoint) return peer.record()->refusal();
  auto answer = std::make_shared<std::promise<Result<std::shared_ptr<const RemoteRegion>>>>();
  auto future = answer->get_future();
  caf::anon_send(endpoint, FindRegion{peer.record(), name, answer});
  if (future.wait_for(config_.connect_timeout + std::chrono::seconds(1)) != std::future_status::ready)
    return {Errc::timed_out,
            fmt::format("peer '{}' did not say in time whether it has a region '{}'", peer.name(), name)};
  auto result = future.get();
  if (!result) return result.status();
  return RemoteHandle(std::move(*result));
}

// ---------------------------------------------------------------- transfers

Status Engine::Impl::check_peer(const Peer& peer) const {
  if (stopping_.load(std::memory_order_relaxed)) return shutting_down();
  if (!peer) return {Errc::invalid_argument, "the peer handle is empty: use one from connect() or accept()"};
  if (peer.record()->owner_incarnation != incarnation_)
    return {Errc::invalid_argument, fmt::format("the handle of peer '{}' belongs to another engine", peer.name())};
  return {};
}

Transfer Engine::Impl::refused(Status status) {
  metrics_.transfers_failed.fetch_add(1, std::memory_order_relaxed);
  return Transfer::ended(std::move(status));
}

TransferState::Request Engine::Impl::request(Op op, const TransferOptions& options) const {
  TransferState::Request request;
  request.op = op;
  request.priority = options.priority;
  const Duration limit = options.deadline > Duration::zero() ? options.deadline : Duration(config_.transfer_timeout);
  const TimePoint now = Clock::now();
  request.deadline = limit < TimePoint::max() - now ? now + limit : TimePoint::max();
  request.owner = owner_;
  request.wait_spin = config_.wait_spin;
  return request;
}

Transfer Engine::Impl::submit(Op op, const Peer& peer, const Region& local, std::string_view name,
                              std::shared_ptr<const RemoteRegion> remote, std::span<const Slice> slices,
                              std::uint32_t immediate, const TransferOptions& options) {
  metrics_.transfers_started.fetch_add(1, std::memory_order_relaxed);
  if (Status status = check_peer(peer); !status.is_ok()) return refused(std::move(status));
  if (!local) return refused({Errc::invalid_argument, "the local region handle is empty"});
  if (regions_.find(local.record()->key) != local.record().get())
    return refused({Errc::unknown_region,
                    fmt::format("local region '{}' is not registered with this engine (any more)", local.name())});
  if (Status status = check_options(options); !status.is_ok()) return refused(std::move(status));
  PeerRecord& record = *peer.record();
  if (!remote && name.empty())
    return refused({Errc::invalid_argument, "no remote region is given: name it, or use a handle from find_region()"});
  if (!remote) remote = record.find_region(name);
  if (remote) {
    if (Status status = check_slices(slices, *local.record(), *remote, op); !status.is_ok())
      return refused(status.with_context(fmt::format("{} with peer '{}'", to_string(op), record.name)));
  }
  TransferState::Request wanted = request(op, options);
  wanted.local = local.record();
  wanted.remote = remote;
  wanted.slices = slices;
  wanted.immediate = immediate;
  if (record.one_sided.load(std::memory_order_relaxed)) {
    wanted.wait_spin += copy_time(slices);
    wanted.wait_yields = false;
  } else if (bytes_of(slices) >= bytes_worth_sleeping) {
    wanted.wait_spin = Duration::zero();
  }
  const bool large = config_.pollers > 1 && op != Op::write_imm;
  if (large && bytes_of(slices) >= config_.split_bytes) wanted.owner = std::make_shared<SplitOwner>(wanted.owner);
  metrics_.slices.fetch_add(slices.size(), std::memory_order_relaxed);
  return hand_over(TransferState::create(std::move(wanted)), peer, remote ? std::string() : std::string(name));
}

Transfer Engine::Impl::send(const Peer& peer, std::span<const std::byte> message, const TransferOptions& options) {
  metrics_.transfers_started.fetch_add(1, std::memory_order_relaxed);
  if (Status status = check_peer(peer); !status.is_ok()) return refused(std::move(status));
  if (Status status = check_options(options); !status.is_ok()) return refused(std::move(status));
  if (message.size() > max_message_bytes)
    return refused(
        {Errc::too_large, fmt::format("a message has at most {} bytes, this one has {}: write larger data to a "
                                      "region",
                                      max_message_bytes, message.size())});
  TransferState::Request wanted = request(Op::send, options);
  wanted.message = message;
  return hand_over(TransferState::create(std::move(wanted)), peer, {});
}

Transfer Engine::Impl::recv(const Peer& peer, std::span<std::byte> buffer, const TransferOptions& options) {
  metrics_.transfers_started.fetch_add(1, std::memory_order_relaxed);
  if (Status status = check_peer(peer); !status.is_ok()) return refused(std::move(status));
  if (Status status = check_options(options); !status.is_ok()) return refused(std::move(status));
  const PeerState state = peer.record()->state.load(std::memory_order_acquire);
  if (state == PeerState::lost || state == PeerState::stale || state == PeerState::closed)
    return refused(peer.record()->refusal());
  auto transfer = TransferState::create(request(Op::recv, options));
  transfer->receive_buffer = buffer;
  transfer->peer_slot = peer.record()->slot;
  transfer->submitted_at = Clock::now();
  Transfer handle(transfer);
  push(std::move(transfer), *peer.record(), 0);
  return handle;
}

Transfer Engine::Impl::hand_over(RefPtr<TransferState> state, const Peer& peer, std::string region) {
  PeerRecord& record = *peer.record();
  state->peer_slot = record.slot;
  state->submitted_at = Clock::now();
  Transfer handle(state);
  const bool nothing_to_do = state->slices().empty() && (state->op() == Op::read || state->op() == Op::write);
  if (nothing_to_do && region.empty()) {
    metrics_.transfers_ok.fetch_add(1, std::memory_order_relaxed);
    state->complete({});
    return handle;
  }
  const PeerState peer_state = record.state.load(std::memory_order_acquire);
  if (state->op() == Op::send) {
    // Never by way of the endpoint: what comes straight after it, once the peer is up, would overtake it.
    if (peer_state == PeerState::up || peer_state == PeerState::suspect || peer_state == PeerState::connecting)
      launch(std::move(state), record);
    else
      state->complete(record.refusal());
    return handle;
  }
  if (region.empty() && peer_state == PeerState::up) {
    launch(std::move(state), record);
    return handle;
  }
  if (auto endpoint = find_endpoint(record.address()); endpoint && !stopping_)
    caf::anon_send(endpoint, SubmitSlowly{std::move(state), peer.record(), std::move(region)});
  else
    state->complete(record.refusal());
  return handle;
}

void Engine::Impl::launch(RefPtr<TransferState> state, PeerRecord& peer) {
  // A region that was asked for is checked only now that its size is known.
  if (state->remote()) {
    if (Status status = check_slices(state->slices(), *state->local(), *state->remote(), state->op());
        !status.is_ok()) {
      metrics_.transfers_failed.fetch_add(1, std::memory_order_relaxed);
      state->complete(status.with_context(fmt::format("{} with peer '{}'", to_string(state->op()), peer.name)));
      return;
    }
  }
  if (config_.pollers > 1 && dynamic_cast<SplitOwner*>(state->owner().get())) {
    if (auto record = peers_.find_slot(peer.slot))
      caf::anon_send(scheduler_, SplitTransfer{std::move(state), std::move(record)});
    else
      state->complete(peer.refusal());
    return;
  }
  // Bytes in flight matter only where there is a choice between groups.
  if (groups_.size() > 1) state->backlog = state->bytes();
  std::uint32_t group = 0;
  // Messages always take group 0, which has rails of every transport: in two groups at once they could
  // overtake each other, and the peer takes an overtaken one for a duplicate.
  if (groups_.size() > 1 && state->op() != Op::send) group = pick_group(peer).value_or(0);
  push(std::move(state), peer, group);
}

void Engine::Impl::push(RefPtr<TransferState> state, PeerRecord& peer, std::uint32_t group) {
  if (state->backlog > 0) peer.backlog[group].fetch_add(state->backlog, std::memory_order_relaxed);
  if (!groups_[group].submissions->push(state)) state->complete(shutting_down());
}

// ---------------------------------------------------------------- Engine, the face

Result<Engine> Engine::start(EngineConfig config) { return start(std::move(config), {}); }

Result<Engine> Engine::start(EngineConfig config, std::vector<std::shared_ptr<Transport>> transports) {
  auto impl = std::make_unique<Impl>(std::move(config), std::move(transports));
  if (Status status = impl->start(); !status.is_ok()) return status;
  return Engine(std::move(impl));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&& other) noexcept {
  if (this != &other) {
    const Engine old(std::move(*this));
    impl_ = std::move(other.impl_);
  }
  return *this;
}
Engine::~Engine() {
  // In a callback the engine can not wait for the thread that it stands on.
  if (impl_ && impl_->owns_this_thread()) std::thread([impl = std::move(impl_)] {}).detach();
}

const std::string& Engine::name() const { return impl_->config().name; }
std::uint64_t Engine::incarnation() const { return impl_->incarnation(); }
const std::string& Engine::address() const { return impl_->address(); }

Result<Region> Engine::register_memory(std::string name, void* data, std::uint64_t bytes, RegisterOptions options) {
  if (!data || bytes == 0) return {Errc::invalid_argument, fmt::format("region '{}' has no memory", name)};
  auto record = std::make_unique<RegionRecord>();
  record->name = std::move(name);
  record->data = static_cast<std::byte*>(data);
  record->size = bytes;
  record->access = options.access;
  record->leasable = options.leasable;
  if (Status status = check_mapped(record->name, record->data, bytes); !status.is_ok()) return status;
  return impl_->register_memory(std::move(record));
}

Result<Region> Engine::allocate(std::string name, std::uint64_t bytes, RegisterOptions options) {
  auto record = allocate_region(std::move(name), bytes, options.access);
  if (!record) return record.status();
  (*record)->leasable = options.leasable;
  return impl_->register_memory(std::move(*record));
}

Status Engine::unregister_region(const Region& region) { return impl_->unregister_region(region); }

Result<Lease> Engine::lease(const Peer& peer, const Region& region, std::span<const ByteRange> ranges,
                            LeaseOptions options) {
  return impl_->lease(peer, region, ranges, options);
}

Status Engine::revoke(const Lease& lease) { return impl_->revoke(lease); }
Result<Peer> Engine::connect(const std::string& address) { return impl_->connect(address); }
Result<Peer> Engine::accept(const std::string& name, Duration limit) { return impl_->accept(name, limit); }

std::vector<Peer> Engine::peers() const {
  std::vector<Peer> peers;
  for (auto& record : impl_->peers().all()) peers.emplace_back(std::move(record));
  return peers;
}

void Engine::disconnect(const Peer& peer) { impl_->disconnect(peer); }

Result<RemoteHandle> Engine::find_region(const Peer& peer, const std::string& name) {
  return impl_->find_region(peer, name);
}

Transfer Engine::read(const Peer& peer, const Region& local, std::string_view remote, std::span<const Slice> slices,
                      TransferOptions options) {
  return impl_->submit(Op::read, peer, local, remote, nullptr, slices, 0, options);
}

Transfer Engine::write(const Peer& peer, const Region& local, std::string_view remote, std::span<const Slice> slices,
                       TransferOptions options) {
  return impl_->submit(Op::write, peer, local, remote, nullptr, slices, 0, options);
}

Transfer Engine::write_imm(const Peer& peer, const Region& local, std::string_view remote,
                           std::span<const Slice> slices, std::uint32_t immediate, TransferOptions options) {
  return impl_->submit(Op::write_imm, peer, local, remote, nullptr, slices, immediate, options);
}

Transfer Engine::read(const Peer& peer, const Region& local, const RemoteHandle& remote, std::span<const Slice> slices,
                      TransferOptions options) {
  return impl_->submit(Op::read, peer, local, {}, remote.region(), slices, 0, options);
}

Transfer Engine::write(const Peer& peer, const Region& local, const RemoteHandle& remote, std::span<const Slice> slices,
                       TransferOptions options) {
  return impl_->submit(Op::write, peer, local, {}, remote.region(), slices, 0, options);
}

Transfer Engine::write_imm(const Peer& peer, const Region& local, const RemoteHandle& remote,
                           std::span<const Slice> slices, std::uint32_t immediate, TransferOptions options) {
  return impl_->submit(Op::write_imm, peer, local, {}, remote.region(), slices, immediate, options);
}

Result<Notification> Engine::next_notification(Duration limit) {
  if (auto notification = impl_->notifications().pop(limit)) return std::move(*notification);
  return {Errc::timed_out, "no notification arrived in time"};
}

Transfer Engine::send(const Peer& peer, std::span<const std::byte> message, TransferOptions options) {
  return impl_->send(peer, message, options);
}

Transfer Engine::recv(const Peer& peer, std::span<std::byte> buffer, TransferOptions options) {
  return impl_->recv(peer, buffer, options);
}

Metrics Engine::metrics() const { return Metrics::of(impl_->counters()); }

}  // namespace kvferry
