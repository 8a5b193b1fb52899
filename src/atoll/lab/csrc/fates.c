#include "fates.h"

#include <string.h>

typedef unsigned __int128 wide;

#define PS_PER_SECOND INT64_C(1000000000000)
#define NEVER INT64_MAX
enum { SLOT_BYTES = 1500 };
enum purpose { LOSS = 1, JITTER, REORDER, DUPLICATE, CORRUPT };

/* -- random numbers: splitmix64 to seed, xoshiro256++ to draw (Blackman, Vigna 2019) -- */

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint64_t key_of(uint64_t seed, uint64_t link, enum purpose purpose)
{
    return mix(mix(mix(seed) ^ link) ^ (uint64_t)purpose);
}

static void generator_start(struct generator *g, uint64_t key)
{
    for (int i = 0; i < 4; i++)
        g->s[i] = key = mix(key);
}

static inline uint64_t rotl(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }

static inline uint64_t draw(struct generator *g)
{
    uint64_t *s = g->s, result = rotl(s[0] + s[3], 23) + s[0], t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

static inline bool happens(struct generator *g, int64_t probability)
{
    return (int64_t)(draw(g) >> 1) < probability;
}

/* -- phases -- */

static inline int64_t end_ps(const struct direction *d, int phase)
{
    return phase + 1 < d->count ? d->phases[phase + 1].at * 1000 : NEVER;
}

static inline void advance(const struct direction *d, int *phase, int64_t ps)
{
    while (end_ps(d, *phase) <= ps)
        ++*phase;
}

void direction_start(struct direction *d, const struct tables *tables, const struct phase *phases, int count,
                     uint64_t seed, uint64_t link)
{
    memset(d, 0, sizeof *d);
    d->tables = tables;
    d->phases = phases;
    d->count = count;
    d->knot = -2;
    d->jitter_key = key_of(seed, link, JITTER);
    generator_start(&d->loss, key_of(seed, link, LOSS));
    generator_start(&d->reorder, key_of(seed, link, REORDER));
    generator_start(&d->duplicate, key_of(seed, link, DUPLICATE));
    generator_start(&d->corrupt, key_of(seed, link, CORRUPT));
}

/* -- the queue and the wire -- */

/* The bytes that the wire has taken and not yet sent at `now`, at the rates that hold until it has. */
static int64_t backlog(const struct direction *d, int64_t now)
{
    if (d->free_ps <= now)
        return 0;
    wide work = 0;
    int phase = d->arriving;
    for (; end_ps(d, phase) < d->free_ps; now = end_ps(d, phase++))
        work += (wide)(end_ps(d, phase) - now) * d->phases[phase].rate;
    work += (wide)(d->free_ps - now) * d->phases[phase].rate + PS_PER_SECOND / 2;
    return work >> 64 ? (int64_t)(work / PS_PER_SECOND) : (int64_t)((uint64_t)work / PS_PER_SECOND);
}

/* Put `bytes` on the wire behind what it has; returns how long they take (ps) and sets free_ps. */
static int64_t transmit(struct direction *d, int64_t now, int64_t bytes)
{
    int64_t start = d->free_ps;
    if (start < now) {
        start = now;
        d->remainder = 0;
    }
    advance(d, &d->leaving, start);
    int64_t rate = d->phases[d->leaving].rate, begun = start;
    uint64_t work = (uint64_t)bytes * PS_PER_SECOND + (uint64_t)d->remainder;
    int64_t takes = (int64_t)(work / (uint64_t)rate);
    d->remainder = (int64_t)(work % (uint64_t)rate);
    while (takes > end_ps(d, d->leaving) - start) { /* the rest goes at the next phase's rate */
        int64_t end = end_ps(d, d->leaving), next = d->phases[++d->leaving].rate;
        takes = (int64_t)((wide)(takes - (end - start)) * rate / next);
        start = end;
        rate = next;
        d->remainder = 0;
    }
    d->free_ps = start + takes;
    advance(d, &d->leaving, d->free_ps);
    return d->free_ps - begun;
}

/* -- loss: the Gilbert-Elliott chain, driven by the time on the wire -- */

/* x^n in units of 2^-63. */
static int64_t power(int64_t x, int64_t n)
{
    uint64_t base = (uint64_t)(x < 0 ? -x : x), result = UINT64_C(1) << 63;
    bool negative = x < 0 && (n & 1);
    for (; n && result; n >>= 1) {
        if (n & 1)
            result = (uint64_t)((wide)result * base >> 63);
        base = (uint64_t)((wide)base * base >> 63);
    }
    if (result > INT64_MAX)
        result = INT64_MAX;
    return negative ? -(int64_t)result : (int64_t)result;
}

static int64_t slots_since(struct direction *d, const struct phase *p)
{
    int64_t slot = SLOT_BYTES * PS_PER_SECOND / p->rate, since = d->free_ps - d->slot_clock;
    if (since < 2 * slot) { /* no packet takes less than a slot, and what is left over is not owed */
        d->slot_clock = since < slot ? d->free_ps : d->slot_clock + slot;
        return 1;
    }
    int64_t slots = since / slot;
    d->slot_clock += slots * slot;
    return slots;
}

static bool is_bad(struct direction *d, const struct phase *p)
{
    int64_t slots = slots_since(d, p), stays = slots == 1 ? p->memory : power(p->memory, slots);
    /* P(bad in n slots | now) = loss + (now - loss) * memory^n */
    int64_t from = d->bad ? INT64_MAX - p->loss : -p->loss;
    int64_t chance = p->loss + (int64_t)(((__int128)from * stays) >> 63);
    d->bad = happens(&d->loss, chance) && p->loss > 0;
    return d->bad;
}

/* -- jitter: a smooth course over time, with the asked distribution at every moment -- */

static int64_t interpolate(const int32_t *table, uint64_t at, int bits)
{
    uint64_t cell = at >> bits, part = at & ((UINT64_C(1) << bits) - 1);
    int64_t low = table[cell], high = table[cell + 1];
    return low + (((high - low) * (int64_t)part) >> bits);
}

static int64_t knot_value(const struct direction *d, int64_t knot)
{
    uint64_t uniform = mix(d->jitter_key ^ mix((uint64_t)knot)) >> 36; /* 28 bits: 12 of cell, 16 within */
    return interpolate(d->tables->normal, uniform, 16);
}

/* Independent normal values stand at knots a period apart; between two of them the value is
 * cos(a) first + sin(a) second, which is standard normal as well, and a table makes it the asked shape. */
static int64_t jitter_at(struct direction *d, const struct phase *p, int64_t now)
{
    if (p->jitter == 0)
        return 0;
    int64_t knot = now / p->period;
    if (knot != d->knot) {
        d->value[0] = knot_value(d, knot);
        d->value[1] = knot_value(d, knot + 1);
        d->knot = knot;
    }
    int64_t angle = (int64_t)((wide)(now - knot * p->period) * QUARTER / (wide)p->period);
    const int32_t *cosine = d->tables->cosine;
    int64_t normal = (d->value[0] * cosine[angle] + d->value[1] * cosine[QUARTER - angle]) >> 16;
    int64_t from = normal + (INT64_C(6) << 16), most = (INT64_C(12) << 16) - 1;
    from = from < 0 ? 0 : from > most ? most : from;
    int64_t deviations = interpolate(d->tables->shape[p->shape], (uint64_t)from, 10);
    return (int64_t)(((__int128)deviations * p->jitter) >> 16);
}

/* -- all of it -- */

void direction_decide(struct direction *d, int64_t now, int64_t bytes, struct fate *fate)
{
    int64_t now_ps = now * 1000;
    advance(d, &d->arriving, now_ps);
    memset(fate, 0, sizeof *fate);
    if (backlog(d, now_ps) + bytes > d->phases[d->arriving].queue) {
        fate->verdict = LOST_QUEUE;
        return;
    }
    fate->busy_ps = transmit(d, now_ps, bytes);
    fate->left = d->free_ps / 1000;

    /* Each packet on the wire draws from each generator, whatever becomes of it: so one quality's fates do
     * not depend on another's. */
    const struct phase *p = &d->phases[d->leaving];
    bool lost = is_bad(d, p), early = happens(&d->reorder, p->reorder);
    fate->copies = 1 + happens(&d->duplicate, p->duplicate);
    fate->draw = draw(&d->corrupt);
    fate->corrupted = (int64_t)(fate->draw >> 1) < p->corrupt;
    if (fate->corrupted)
        fate->draw = mix(fate->draw);
    if (p->down || lost) {
        fate->verdict = p->down ? LOST_OUTAGE : LOST_WIRE;
        return;
    }
    int64_t delay = p->delay + jitter_at(d, p, fate->left);
    int64_t due = fate->left + (delay > 0 ? delay : 0);
    int64_t sooner = due - p->reorder_by;
    if (sooner < fate->left)
        sooner = fate->left;
    fate->overtook = early && sooner < d->last;
    if (fate->overtook) {
        fate->delivered = sooner;
        return;
    }
    fate->delivered = d->last = due > d->last ? due : d->last;
}
