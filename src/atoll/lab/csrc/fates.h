/* What becomes of each packet of one direction of a link: the only place where that is decided.
 *
 * Integers alone, so that a seed gives the same fates on every machine. Times are nanoseconds since the
 * start of the lab; on the wire, where a byte may take less than one, picoseconds (106 days of them). */
#ifndef ATOLL_FATES_H
#define ATOLL_FATES_H

#include <stdbool.h>
#include <stdint.h>

enum { KNOTS = 4096, QUARTER = 1024, SHAPES = 3, SHAPE_CELLS = 768 };

/* Tables that emulator.py computes, in units of 1/65536: exact functions need no floating point here. */
struct tables {
    int32_t normal[KNOTS + 1];                  /* inverse of the normal distribution, at equal steps */
    int32_t cosine[QUARTER + 1];                /* from 0 to pi / 2 */
    int32_t shape[SHAPES][SHAPE_CELLS + 1];     /* jitter in standard deviations, of normal -6 to 6 */
};

/* A phase as emulator.py packs it. Probabilities are in units of 2^-63. */
struct phase {
    int64_t at;           /* ns */
    int64_t rate;         /* bytes/s */
    int64_t delay;        /* ns */
    int64_t jitter;       /* ns: standard deviation */
    int64_t period;       /* ns between the knots of the jitter's course */
    int64_t shape;        /* index of its distribution */
    int64_t queue;        /* bytes */
    int64_t loss;         /* stationary probability of the bad state */
    int64_t memory;       /* the chain's second eigenvalue: 0 is independent loss; may be negative */
    int64_t reorder;
    int64_t reorder_by;   /* ns */
    int64_t duplicate;
    int64_t corrupt;
    int64_t down;
};
enum { PHASE_FIELDS = sizeof(struct phase) / sizeof(int64_t) };

enum verdict { DELIVERED, LOST_QUEUE, LOST_WIRE, LOST_OUTAGE };

struct fate {
    enum verdict verdict;
    int64_t left;         /* ns: when its last byte is on the wire */
    int64_t delivered;    /* ns */
    int64_t busy_ps;      /* how long the wire was its own */
    int copies;
    bool corrupted;
    bool overtook;
    uint64_t draw;        /* for the place of the flipped bit */
};

struct generator { uint64_t s[4]; };

struct direction {
    const struct tables *tables;
    const struct phase *phases;
    int count;
    int arriving;         /* the phase of the last arrival */
    int leaving;          /* the phase of the last departure */
    int64_t free_ps;      /* when the wire has sent all that it has taken */
    int64_t remainder;    /* of free_ps, in 1/rate picoseconds */
    int64_t slot_clock;   /* ps: up to when the burst chain has gone */
    bool bad;             /* its state */
    int64_t last;         /* ns: the latest delivery of those that keep their order */
    uint64_t jitter_key;
    int64_t knot;         /* the jitter's course goes from value[0] at `knot` to value[1] at the next one */
    int64_t value[2];
    struct generator loss, reorder, duplicate, corrupt;
};

void direction_start(struct direction *d, const struct tables *tables, const struct phase *phases, int count,
                     uint64_t seed, uint64_t link);

/* The fate of a packet of `bytes` that comes at `now` (ns), not before the one before it. */
void direction_decide(struct direction *d, int64_t now, int64_t bytes, struct fate *fate);

#endif
