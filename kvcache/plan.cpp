#include <algorithm>
#include <array>
#include <functional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <kvferry/kvcache/plan.hpp>

namespace kvferry {
namespace {

Status invalid(std::string text) { return {Errc::invalid_argument, "KV plan: " + std::move(text)}; }
Status beyond(std::string text) { return {Errc::out_of_bounds, "KV plan: " + std::move(text)}; }

// ---------------------------------------------------------------- checks

Status check_side(const PlanSide& side, std::string_view name) {
  if (!side.layout) return invalid(fmt::format("the {} has no layout", name));
  const std::uint32_t ranks = side.layout->spec().tp_size;
  if (side.rank >= ranks)
    return invalid(fmt::format("the {}'s rank {} is not below its tp_size {}", name, side.rank, ranks));
  return {};
}

Status check_range(const IndexRange& range, std::string_view name) {
  if (range.end < range.first)
    return invalid(fmt::format("the {} range [{}, {}) ends before it begins", name, range.first, range.end));
  return {};
}

Status check_layers(const IndexRange& range, const Layout& layout) {
  const std::uint32_t layers = layout.spec().layers;
  if (range.end > layers)
    return beyond(fmt::format("layers [{}, {}) of a model with {}", range.first, range.end, layers));
  return {};
}

std::span<const BlockId> used_blocks(const PlanSide& side, const IndexRange& tokens) {
  const std::uint32_t size = side.layout->spec().block_tokens;
  const std::uint32_t first = tokens.first / size;
  return side.blocks.subspan(first, (tokens.end - 1) / size + 1 - first);
}

Status check_blocks(const PlanSide& side, const IndexRange& tokens, std::string_view name) {
  const LayoutSpec& spec = side.layout->spec();
  const std::uint64_t room = side.blocks.size() * std::uint64_t{spec.block_tokens};
  if (tokens.end > room)
    return beyond(fmt::format("the {}'s {} blocks of {} tokens end before token {}", name, side.blocks.size(),
                              spec.block_tokens, tokens.end));
  for (const BlockId id : used_blocks(side, tokens))
    if (id >= spec.blocks) return beyond(fmt::format("block {} of the {}, whose pool has {}", id, name, spec.blocks));
  return {};
}

/// Two parts of a sequence in one block would overwrite each other, and no later check could tell.
Status check_distinct(const PlanSide& destination, const IndexRange& tokens) {
  std::vector<bool> seen(destination.layout->spec().blocks);
  for (const BlockId id : used_blocks(destination, tokens)) {
    if (seen[id]) return invalid(fmt::format("block {} is twice in the destination's block table", id));
    seen[id] = true;
  }
  return {};
}

Status check(const PlanRequest& request) {
  if (Status status = check_side(request.source, "source"); !status) return status;
  if (Status status = check_side(request.destination, "destination"); !status) return status;
  if (Status status = check_exchange(*request.source.layout, *request.destination.layout); !status) return status;
  if (request.payload == Payload::scales && !request.source.layout->spec().scales)
    return invalid("scales are asked for, but these layouts have none");
  if (Status status = check_range(request.tokens, "token"); !status) return status;
  if (Status status = check_range(request.layers, "layer"); !status) return status;
  if (Status status = check_layers(request.layers, *request.source.layout); !status) return status;
  if (request.tokens.count() == 0) return {};
  if (Status status = check_blocks(request.source, request.tokens, "source"); !status) return status;
  if (Status status = check_blocks(request.destination, request.tokens, "destination"); !status) return status;
  return check_distinct(request.destination, request.tokens);
}

// ---------------------------------------------------------------- heads

HeadRange common_heads(const HeadRange& a, const HeadRange& b) noexcept {
  const std::uint32_t first = std::max(a.first, b.first);
  const std::uint32_t end = std::min(a.end(), b.end());
  return {first, end > first ? end - first : 0};
}

// ---------------------------------------------------------------- segments

/// Neighbouring tokens that share a block on each side.
struct Segment {
  BlockId local_block;
  BlockId remote_block;
  std::uint32_t local_token;  ///< inside the block
  std::uint32_t remote_token;
  std::uint32_t tokens;
};

/// All segments of a token range, ordered by their place in the local blocks, so that neighbours in
/// memory become neighbours in the list.
std::vector<Segment> segments_of(const PlanSide& local, const PlanSide& remote, const IndexRange& tokens) {
  const std::uint32_t local_size = local.layout->spec().block_tokens;
  const std::uint32_t remote_size = remote.layout->spec().block_tokens;
  std::vector<Segment> segments;
  segments.reserve(tokens.count() / local_size + tokens.count() / remote_size + 2);
  for (std::uint32_t token = tokens.first; token < tokens.end;) {
    const std::uint32_t in_local = token % local_size;
    const std::uint32_t in_remote = token % remote_size;
    const std::uint32_t count = std::min({local_size - in_local, remote_size - in_remote, tokens.end - token});
    segments.push_back(
        {local.blocks[token / local_size], remote.blocks[token / remote_size], in_local, in_remote, count});
    token += count;
  }
  const auto place = [](const Segment& s) { return std::pair(s.local_block, s.local_token); };
  if (!std::ranges::is_sorted(segments, {}, place)) std::ranges::sort(segments, {}, place);
  return segments;
}

// ---------------------------------------------------------------- the walk

/// Collects runs and joins each with the one before when they touch on both sides.
class RunSink {
 public:
  explicit RunSink(std::size_t most_runs) { slices_.reserve(std::min(most_runs, most_reserved)); }

  void add(std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
    if (local == local_end_ && remote == remote_end_ && !slices_.empty()) {
      slices_.back().length += length;
    } else {
      ascending_ &= local >= local_end_;
      slices_.push_back({local, remote, length});
    }
    local_end_ = local + length;
    remote_end_ = remote + length;
  }

  /// Runs that did not come in order may touch without having been neighbours.
  std::vector<Slice> finish() && {
    if (!ascending_) {
      std::ranges::sort(slices_, {}, [](const Slice& s) { return std::pair(s.local_offset, s.remote_offset); });
      slices_.resize(merge_slices(slices_, slices_.data()));
    }
    if (slices_.size() < slices_.capacity() / 4) slices_.shrink_to_fit();
    return std::move(slices_);
  }

 private:
  /// 96 MiB. A bound above it says more of the request than of what will be left after joining.
  static constexpr std::size_t most_reserved = 4u << 20;

  std::vector<Slice> slices_;
  std::uint64_t local_end_ = 0;
  std::uint64_t remote_end_ = 0;
  bool ascending_ = true;
};

/// A dimension that is walked index by index.
struct Level {
  Dim dim = Dim::layer;
  std::uint32_t count = 0;
  std::uint64_t local_stride = 0;
  std::uint64_t remote_stride = 0;
};

/// How to walk what lies inside a block: the dimensions, outermost first, that no run covers.
struct InnerWalk {
  std::array<Level, 4> levels;
  std::size_t depth = 0;
  std::uint64_t run = 0;           ///< bytes that are contiguous on both sides
  bool run_covers_tokens = false;  ///< no level leads through the tokens
  bool run_is_per_token = false;   ///< the run's length is `run` times the segment's tokens
};

/// Walks the local side in the order of its addresses: outer dimensions, then blocks, then what lies
/// inside a block. In a whole block runs may reach beyond the tokens, in a part of one they may not,
/// so each has an inner walk of its own.
class Planner {
 public:
  Planner(const PlanRequest& request, const PlanSide& local, const PlanSide& remote, const HeadRange& heads)
      : local_(placement(local, request.payload)),
        remote_(placement(remote, request.payload)),
        local_tokens_(local.layout->spec().block_tokens),
        remote_tokens_(remote.layout->spec().block_tokens),
        segments_(segments_of(local, remote, request.tokens)),
        local_start_(start(local_, local, request.layers, heads)),
        remote_start_(start(remote_, remote, request.layers, heads)) {
    sort_levels(request.layers.count(), local.layout->parts(), heads.count);
    const std::uint64_t element = request.payload == Payload::values ? local.layout->head_bytes()
                                                                     : dtype_bytes(local.layout->spec().scales->dtype);
    whole_ = inner_walk(element, local_tokens_);
    partial_ = inner_walk(element, std::min(local_tokens_, remote_tokens_) == 1 ? 1 : any_number);
  }

  std::vector<Slice> plan() const {
    RunSink sink(most_runs());
    walk_outer(0, local_start_, remote_start_, sink);
    return std::move(sink).finish();
  }

 private:
  using Segments = std::span<const Segment>;
  static constexpr std::uint32_t any_number = 0;

  static const Placement& placement(const PlanSide& side, Payload payload) {
    const LayoutSpec& spec = side.layout->spec();
    return payload == Payload::values ? spec.values : spec.scales->placement;
  }

  static std::uint64_t start(const Placement& placement, const PlanSide& side, const IndexRange& layers,
                             const HeadRange& heads) {
    const std::uint64_t first_head = heads.first - side.layout->heads_of(side.rank).first;
    return placement.offset + layers.first * placement.strides.layer + first_head * placement.strides.head;
  }

  /// From the largest local stride to the smallest; dimensions of a single index are left out. Blocks
  /// stay outside tokens whatever their strides: RunSink puts such runs in order.
  void sort_levels(std::uint32_t layers, std::uint32_t parts, std::uint32_t heads) {
    std::vector<Level> levels;
    const auto add = [&](Dim dim, std::uint32_t count) {
      levels.push_back({dim, count, local_.strides.of(dim), remote_.strides.of(dim)});
    };
    if (layers > 1) add(Dim::layer, layers);
    if (parts > 1) add(Dim::part, parts);
    add(Dim::block, 0);
    add(Dim::token, local_tokens_);
    if (heads > 1) add(Dim::head, heads);
    std::ranges::stable_sort(levels, std::ranges::greater(), &Level::local_stride);

    const auto token = std::ranges::find(levels, Dim::token, &Level::dim);
    auto block = std::ranges::find(levels, Dim::block, &Level::dim);
    if (token < block) {
      std::iter_swap(token, block);
      block = token;
    }
    outer_.assign(levels.begin(), block);
    inner_.assign(block + 1, levels.end());
  }

  /// The walk of segments with that many tokens: from the innermost dimension, as long as the next
  /// one continues the run on both sides, the run swallows it.
  InnerWalk inner_walk(std::uint64_t element, std::uint32_t tokens) const {
    InnerWalk walk;
    walk.run = element;
    std::size_t left = inner_.size();
    for (; left > 0 && !walk.run_is_per_token; --left) {
      const Level& level = inner_[left - 1];
      const bool is_token = level.dim == Dim::token;
      const bool continues = level.local_stride == walk.run && level.remote_stride == walk.run;
      if (!continues && !(is_token && tokens == 1)) break;
      if (is_token) walk.run_covers_tokens = true;
      if (is_token && tokens == any_number)
        walk.run_is_per_token = true;
      else
        walk.run *= is_token ? tokens : level.count;
    }
    std::copy_n(inner_.begin(), left, walk.levels.begin());
    walk.depth = left;
    return walk;
  }

  /// Covers its local block. Where the remote block is larger, no stride there continues the run
  /// beyond the tokens, so nothing else has to be asked.
  bool is_whole(const Segment& segment) const { return segment.tokens == local_tokens_; }

  std::size_t most_runs() const {
    std::size_t runs = 0;
    for (const Segment& segment : segments_) runs += runs_in(is_whole(segment) ? whole_ : partial_, segment);
    for (const Level& level : outer_) runs *= level.count;
    return runs;
  }

  static std::size_t runs_in(const InnerWalk& walk, const Segment& segment) {
    std::size_t runs = 1;
    for (std::size_t i = 0; i < walk.depth; ++i)
      runs *= walk.levels[i].dim == Dim::token ? segment.tokens : walk.levels[i].count;
    return runs;
  }

  void walk_outer(std::size_t depth, std::uint64_t local, std::uint64_t remote, RunSink& sink) const {
    if (depth == outer_.size()) return walk_blocks(local, remote, sink);
    const Level& level = outer_[depth];
    for (std::uint32_t i = 0; i < level.count; ++i)
      walk_outer(depth + 1, local + i * level.local_stride, remote + i * level.remote_stride, sink);
  }

  void walk_blocks(std::uint64_t local, std::uint64_t remote, RunSink& sink) const {
    for (auto first = segments_.begin(); first != segments_.end();) {
      auto last = first + 1;
      if (is_whole(*first)) {
        walk_inner(whole_, 0, {first, last}, local + first->local_block * local_.strides.block, remote, sink);
      } else {
        while (last != segments_.end() && last->local_block == first->local_block) ++last;
        walk_inner(partial_, 0, {first, last}, local + first->local_block * local_.strides.block, remote, sink);
      }
      first = last;
    }
  }

  /// `segments` share a local block, which `local` has arrived at; their remote blocks differ, so
  /// `remote` gets there where the walk enters a segment.
  void walk_inner(const InnerWalk& walk, std::size_t depth, Segments segments, std::uint64_t local,
                  std::uint64_t remote, RunSink& sink) const {
    if (depth == walk.depth) return add_runs(walk, segments, local, remote, sink);
    const Level& level = walk.levels[depth];
    if (level.dim == Dim::token) return walk_tokens(walk, depth, segments, local, remote, sink);
    for (std::uint32_t i = 0; i < level.count; ++i)
      walk_inner(walk, depth + 1, segments, local + i * level.local_stride, remote + i * level.remote_stride, sink);
  }

  void walk_tokens(const InnerWalk& walk, std::size_t depth, Segments segments, std::uint64_t local,
                   std::uint64_t remote, RunSink& sink) const {
    for (const Segment& segment : segments) {
      const std::uint64_t local_token = local + local_in_block(segment);
      const std::uint64_t remote_token = remote + remote_in_region(segment);
      for (std::uint64_t i = 0; i < segment.tokens; ++i)
        walk_inner(walk, depth + 1, {}, local_token + i * local_.strides.token,
                   remote_token + i * remote_.strides.token, sink);
    }
  }

  void add_runs(const InnerWalk& walk, Segments segments, std::uint64_t local, std::uint64_t remote,
                RunSink& sink) const {
    if (!walk.run_covers_tokens) return sink.add(local, remote, walk.run);
    for (const Segment& segment : segments)
      sink.add(local + local_in_block(segment), remote + remote_in_region(segment),
               walk.run_is_per_token ? walk.run * segment.tokens : walk.run);
  }

  std::uint64_t local_in_block(const Segment& segment) const { return segment.local_token * local_.strides.token; }
  std::uint64_t remote_in_region(const Segment& segment) const {
    return segment.remote_block * remote_.strides.block + segment.remote_token * remote_.strides.token;
  }

  const Placement& local_;
  const Placement& remote_;
  const std::uint32_t local_tokens_;  ///< of a block
  const std::uint32_t remote_tokens_;
  const std::vector<Segment> segments_;
  const std::uint64_t local_start_;
  const std::uint64_t remote_start_;
  std::vector<Level> outer_;
  std::vector<Level> inner_;
  InnerWalk whole_;
  InnerWalk partial_;
};

}  // namespace

Result<std::vector<Slice>> make_plan(const PlanRequest& request) {
  if (Status status = check(request); !status) return status;
  const PlanSide& source = request.source;
  const PlanSide& destination = request.destination;
  if (request.tokens.count() == 0 || request.layers.count() == 0) return std::vector<Slice>();
  if (!sends_heads(*source.layout, source.rank, *destination.layout, destination.rank)) return std::vector<Slice>();

  const HeadRange heads =
      common_heads(source.layout->heads_of(source.rank), destination.layout->heads_of(destination.rank));
  const bool reads = request.initiator == Initiator::destination;
  return Planner(request, reads ? destination : source, reads ? source : destination, heads).plan();
}

bool sends_heads(const Layout& source, std::uint32_t source_rank, const Layout& destination,
                 std::uint32_t destination_rank) noexcept {
  if (common_heads(source.heads_of(source_rank), destination.heads_of(destination_rank)).count == 0) return false;
  const std::uint64_t sources = source.head_replicas();
  const std::uint64_t destinations = destination.head_replicas();
  const std::uint64_t replica = destination_rank % destinations;
  return source_rank % sources == replica * sources / destinations;
}

std::vector<std::uint32_t> source_ranks_of(const Layout& source, const Layout& destination,
                                           std::uint32_t destination_rank) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < source.spec().tp_size; ++rank)
    if (sends_heads(source, rank, destination, destination_rank)) ranks.push_back(rank);
  return ranks;
}

}  // namespace kvferry
