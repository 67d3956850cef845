// Who has seen what: vector clocks over the threads and asynchronous engines of all running kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moksim {

// An entity is one thing whose accesses are ordered among themselves: a warp, or one direction of an asynchronous
// engine (the copies that one mbarrier phase or one bulk group completes, the MMAs of a warpgroup).
using Entity = uint16_t;

class Clock {
  public:
    uint32_t operator[](Entity e) const { return e < times_.size() ? times_[e] : 0; }
    void raise(Entity e, uint32_t time) {
        if (e >= times_.size()) times_.resize(e + 1, 0);
        times_[e] = std::max(times_[e], time);
    }
    void join(const Clock& other) {
        if (other.times_.size() > times_.size()) times_.resize(other.times_.size(), 0);
        for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
    }
    void meet(const Clock& other) {  // what both have seen
        times_.resize(std::min(times_.size(), other.times_.size()));
        for (size_t i = 0; i < times_.size(); ++i) times_[i] = std::min(times_[i], other.times_[i]);
    }
    void clear() { times_.clear(); }
    bool empty() const { return times_.empty(); }

  private:
    std::vector<uint32_t> times_;
};

// Causality order (PTX ISA 8.9.4) in two strengths. `seen`: what happens before. `fenced`: what of it also has a
// fence.proxy.async behind it on the way, so that the async proxy sees it (8.9.4, proxy-preserved base causality
// order).
struct Order {
    Clock seen, fenced;
    void join(const Order& other) {
        seen.join(other.seen);
        fenced.join(other.fenced);
    }
    void meet(const Order& other) {
        seen.meet(other.seen);
        fenced.meet(other.fenced);
    }
    void clear() {
        seen.clear();
        fenced.clear();
    }
};

}  // namespace moksim
