#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <sys/prctl.h>

#include <kvferry/actors/directory_lines.hpp>
#include <kvferry/actors/peer_table.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

using std::chrono::milliseconds;

/// How long a line of questions stays open without one.
constexpr Duration idle_limit = std::chrono::seconds(2);
/// How long list() waits for the other directories once one has answered.
constexpr Duration others_limit = milliseconds(100);
/// How long one question of watch() waits for a change.
constexpr Duration longest_question = std::chrono::seconds(2);

Status of_refusal(const RefusedAnswer& refused) {
  const bool known = refused.code > 0 && refused.code <= static_cast<std::uint32_t>(Errc::internal);
  return {known ? static_cast<Errc>(refused.code) : Errc::internal, refused.text};
}

Status check(const DirectoryClientConfig& config) {
  if (config.directories.empty() || config.directories.size() > 16)
    return {Errc::invalid_argument, fmt::format("{} directories: 1 to 16 are possible", config.directories.size())};
  for (const std::string& address : config.directories)
    if (!address.starts_with("tcp://"))
      return {Errc::invalid_argument, fmt::format("directory '{}' is not of the form tcp://HOST:PORT", address)};
  if (config.time < milliseconds(least_entry_ms) || config.time > milliseconds(most_entry_ms))
    return {Errc::invalid_argument, fmt::format("an entry's time of {} ms: {} to {} are possible", config.time.count(),
                                                least_entry_ms, most_entry_ms)};
  if (config.limit < milliseconds(10) || config.limit > milliseconds(60000))
    return {Errc::invalid_argument,
            fmt::format("a limit of {} ms for answers: 10 to 60000 are possible", config.limit.count())};
  return {};
}

DirectoryKey random_key() { return random_token(); }

}  // namespace

class DirectoryClient::Impl {
 public:
  explicit Impl(DirectoryClientConfig config)
      : config_(std::move(config)),
        key_(random_key()),
        beats_(config_.directories),
        questions_(config_.directories),
        watches_(config_.directories),
        thread_([this] { beat(); }) {}
  ~Impl();

  Status publish(const DirectoryEntry& entry);
  Status withdraw(const std::string& name);
  Result<DirectoryEntry> find(const std::string& name);
  Result<DirectoryListing> list(const std::string& role);
  Result<DirectoryListing> watch(const std::string& role, const DirectoryListing& before, Duration limit);

 private:
  Status tell_all(const std::vector<DirectoryBody>& questions);
  Status nobody() const;
  void beat();
  PublishRequest request_of(const DirectoryEntry& entry) const {
    return {entry, key_, static_cast<std::uint32_t>(config_.time.count())};
  }
  /// All pages of one directory; empty when it does not answer.
  std::optional<ListAnswer> list_of(DirectoryLines& lines, std::size_t directory, ListRequest request, Duration limit);

  const DirectoryClientConfig config_;
  const DirectoryKey key_;

  std::mutex entries_mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::map<std::string, DirectoryEntry> entries_;

  std::mutex beats_mutex_;
  DirectoryLines beats_;
  std::mutex questions_mutex_;
  DirectoryLines questions_;
  TimePoint last_question_;
  std::mutex watches_mutex_;
  DirectoryLines watches_;
  std::size_t watched_directory_ = 0;
  std::thread thread_;
};

Status DirectoryClient::Impl::nobody() const {
  std::string names;
  for (const std::string& address : config_.directories) names += (names.empty() ? "" : ", ") + address;
  return {Errc::unreachable, fmt::format("no directory answered within {} ms: {}", config_.limit.count(), names)};
}

/// Ok as soon as all have answered, if one of them agreed to everything.
Status DirectoryClient::Impl::tell_all(const std::vector<DirectoryBody>& questions) {
  std::vector<std::size_t> agreed(config_.directories.size());
  std::optional<Status> refused;
  const std::lock_guard lock(beats_mutex_);
  beats_.ask(0, beats_.size(), questions, config_.limit,
             [&](std::size_t directory, std::size_t, const DirectoryBody& answer) {
               if (std::holds_alternative<DoneAnswer>(answer)) ++agreed[directory];
               if (const auto* no = std::get_if<RefusedAnswer>(&answer)) refused = of_refusal(*no);
               return false;
             });
  beats_.close();
  if (refused) return *refused;
  if (std::any_of(agreed.begin(), agreed.end(), [&](std::size_t count) { return count == questions.size(); }))
    return {};
  return nobody();
}

Status DirectoryClient::Impl::publish(const DirectoryEntry& entry) {
  if (Status status = check_entry(entry); !status) return status;
  {
    const std::lock_guard lock(entries_mutex_);
    entries_[entry.name] = entry;
  }
  return tell_all({request_of(entry)});
}

Status DirectoryClient::Impl::withdraw(const std::string& name) {
  {
    const std::lock_guard lock(entries_mutex_);
    entries_.erase(name);
  }
  return tell_all({WithdrawRequest{name, key_}});
}

void DirectoryClient::Impl::beat() {
  ::prctl(PR_SET_NAME, "kvferry-direct");
  TimePoint next = Clock::now() + config_.time / 3;
  std::optional<Status> trouble;
  while (true) {
    std::vector<DirectoryBody> questions;
    {
      std::unique_lock lock(entries_mutex_);
      const TimePoint wake = std::min(next, Clock::now() + idle_limit);
      if (stopped_.wait_until(lock, wake, [this] { return stopping_; })) return;
      if (Clock::now() >= next)
        for (const auto& [name, entry] : entries_) questions.push_back(request_of(entry));
    }
    if (const std::unique_lock lock(questions_mutex_, std::try_to_lock);
        lock.owns_lock() && Clock::now() - last_question_ >= idle_limit)
      questions_.close();
    if (Clock::now() < next) continue;
    next = Clock::now() + config_.time / 3;
    if (questions.empty()) continue;
    const Status status = tell_all(questions);
    if (!status && (!trouble || trouble->is_ok())) log(LogLevel::warning, "publishing: " + status.to_string());
    trouble = status;
  }
}

DirectoryClient::Impl::~Impl() {
  std::vector<DirectoryBody> questions;
  {
    const std::lock_guard lock(entries_mutex_);
    stopping_ = true;
    for (const auto& [name, entry] : entries_) questions.push_back(WithdrawRequest{name, key_});
  }
  stopped_.notify_all();
  thread_.join();
  if (!questions.empty()) static_cast<void>(tell_all(questions));
}

// One that does not know the name may have been restarted a moment ago, so others are waited for.
Result<DirectoryEntry> DirectoryClient::Impl::find(const std::string& name) {
  std::optional<DirectoryEntry> found;
  std::optional<Status> refused;
  const std::lock_guard lock(questions_mutex_);
  last_question_ = Clock::now();
  questions_.ask(0, questions_.size(), {FindRequest{name}}, config_.limit,
                 [&](std::size_t, std::size_t, const DirectoryBody& answer) {
                   if (const auto* entry = std::get_if<EntryAnswer>(&answer)) found = entry->entry;
                   if (const auto* no = std::get_if<RefusedAnswer>(&answer)) refused = of_refusal(*no);
                   return found.has_value();
                 });
  if (found) return std::move(*found);
  return refused ? *refused : nobody();
}

std::optional<ListAnswer> DirectoryClient::Impl::list_of(DirectoryLines& lines, std::size_t directory,
                                                         ListRequest request, Duration limit) {
  std::optional<ListAnswer> all;
  bool more = true;
  while (more) {
    std::optional<ListAnswer> page;
    lines.ask(directory, 1, {request}, limit, [&](std::size_t, std::size_t, DirectoryBody answer) {
      if (auto* entries = std::get_if<ListAnswer>(&answer)) page = std::move(*entries);
      return true;
    });
    if (!page) return std::nullopt;
    more = page->more && !page->entries.empty();
    if (more) request.after = page->entries.back().name;
    request.ms = 0;
    limit = config_.limit;
    if (!all) {
      all = std::move(page);
      continue;
    }
    // Watching goes on from the oldest page: what changed since then is told again.
    all->entries.insert(all->entries.end(), page->entries.begin(), page->entries.end());
  }
  return all;
}

Result<DirectoryListing> DirectoryClient::Impl::list(const std::string& role) {
  const std::lock_guard lock(questions_mutex_);
  last_question_ = Clock::now();
  std::map<std::string, DirectoryEntry> merged;
  bool answered = false;
  for (std::size_t directory = 0; directory < questions_.size(); ++directory) {
    const Duration limit = answered ? std::min<Duration>(others_limit, config_.limit) : Duration(config_.limit);
    const auto listing = list_of(questions_, directory, ListRequest{role, {}, 0, 0, 0}, limit);
    if (!listing) continue;
    answered = true;
    for (const DirectoryEntry& entry : listing->entries) merged.emplace(entry.name, entry);
  }
  if (!answered) return nobody();
  DirectoryListing result;
  for (auto& [name, entry] : merged) result.entries.push_back(std::move(entry));
  return result;
}

// In short questions: a directory that is restarted forgets who waits for it.
Result<DirectoryListing> DirectoryClient::Impl::watch(const std::string& role, const DirectoryListing& before,
                                                      Duration limit) {
  const std::lock_guard lock(watches_mutex_);
  const TimePoint until = Clock::now() + std::min<Duration>(limit, milliseconds(max_watch_ms));
  const bool known = before.instance != 0 && before.directory < watches_.size();
  std::size_t directory = known ? before.directory : watched_directory_;
  ListRequest request{role, {}, known ? before.instance : 0, known ? before.version : 0, 0};
  for (std::size_t failed = 0; failed < watches_.size();) {
    const Duration left = std::clamp<Duration>(until - Clock::now(), Duration::zero(), longest_question);
    request.ms = static_cast<std::uint32_t>(std::chrono::duration_cast<milliseconds>(left).count());
    auto listing = list_of(watches_, directory, request, milliseconds(request.ms) + config_.limit);
    if (!listing) {
      watches_.close();
      directory = (directory + 1) % watches_.size();
      // Another one knows nothing of this state, so it answers at once.
      if (watches_.size() > 1) request.instance = 0;
      ++failed;
      continue;
    }
    watched_directory_ = directory;
    const bool same = listing->instance == request.instance && listing->changed <= request.version;
    if (same && Clock::now() < until) continue;
    return DirectoryListing{std::move(listing->entries), static_cast<std::uint32_t>(directory), listing->instance,
                            listing->version};
  }
  return nobody();
}

// ---------------------------------------------------------------- the face

Result<DirectoryClient> DirectoryClient::start(DirectoryClientConfig config) {
  if (Status status = check(config); !status) return status;
  return DirectoryClient(std::make_unique<Impl>(std::move(config)));
}

DirectoryClient::DirectoryClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DirectoryClient::DirectoryClient(DirectoryClient&&) noexcept = default;
DirectoryClient& DirectoryClient::operator=(DirectoryClient&&) noexcept = default;
DirectoryClient::~DirectoryClient() = default;

Status DirectoryClient::publish(const DirectoryEntry& entry) { return impl_->publish(entry); }
Status DirectoryClient::withdraw(const std::string& name) { return impl_->withdraw(name); }
Result<DirectoryEntry> DirectoryClient::find(const std::string& name) { return impl_->find(name); }
Result<DirectoryListing> DirectoryClient::list(const std::string& role) { return impl_->list(role); }
Result<DirectoryListing> DirectoryClient::watch(const std::string& role, const DirectoryListing& before,
                                                Duration limit) {
  return impl_->watch(role, before, limit);
}

}  // namespace kvferry
