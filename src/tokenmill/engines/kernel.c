/* The compiled part of the engine `words`: cuts texts into words, looks them up, gathers their ids.

       bytes -> words -> entries of a hash table -> ids

   New words are handed out to be learned. Those of a SentencePiece Unigram model are learned here:
   the package adds scores up in single precision, along a whole document, and so does this. A word
   is decided once; where its next best pieces are as near as what rounding can have gathered at the
   sum after it, it is decided again from the sum before it, with the package's own arithmetic.

   `words.py` says why words may be cut, and what a word is; but for models it does the same without
   this file. All buffers are checked where they come in. Nothing here depends on the seed but where
   entries are.
*/

#define Py_LIMITED_API 0x030B0000  /* of Python 3.11; here, for every setuptools */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0 || defined(__FAST_MATH__)
#error "sums must be rounded to single precision, as in the package"
#endif

#define INTERFACE 3          /* words.py wants this number */
#define GROUP 64             /* words that are looked for at once, so that memory works ahead */
#define HEAD 16              /* bytes of a word that are in its entry */
#define FEWEST_SLOTS (1 << 12)
#define LONGEST_KEPT 128     /* bytes of a word of a model; longer ones are decided each time */
#define LONGEST_SPELLED 256  /* the same, as pieces write it */
#define LONGEST_WORD (1 << 16)  /* longer ones of a model are the reference's */
#define LONGEST_DOCUMENT (1 << 30)
#define MOST_BYTES (64 << 20)   /* of ids and of long words */
#define SPACE 0xFF           /* U+2581 in pieces */
#define RESET 1e5f           /* the package lets no sum become larger, in size */
#define HALF_ULP (1.0 / (1 << 24))
#define MANY UINT16_MAX
#define NOWHERE UINT32_MAX

enum { FAILED = -1, DONE, HELD };              /* how something went; held: by the reference */
enum { LEARNED, DELICATE, UNLEARNED };         /* what an entry is */

typedef struct {
    uint64_t head[2];        /* the first bytes of the word, filled up with 0xFF */
    uint32_t size, rest;     /* where its other bytes are */
    uint32_t ids;            /* where its ids are; of a model, between its limit and its scores */
    uint16_t num_ids;
    uint8_t num_scores, state;
} Entry;

typedef struct {
    const uint8_t *text;
    uint32_t size, tag;
    uint64_t head[2];
} Word;

/* A place in the trie of pieces. Its child by a byte is at `base + byte`, if that names it as its
   parent. */
typedef struct {
    int32_t base, parent, value;
    float score;
} Node;

/* The best pieces up to a place: their sum, that of the next best ones, where the last one begins,
   and its node; -1 for an unknown character. */
typedef struct {
    double best, next;
    int32_t from, node;
} Choice;

typedef struct {
    float best;
    int32_t from, node;
} Arrival;

typedef struct {             /* memory that grows */
    void *data;
    size_t room;
} Space;

typedef struct {
    PyObject_HEAD
    int is_busy;
    uint64_t seeds[2];
    uint8_t is_space[256];
    int left_out;            /* spaces in front of a word that are not encoded; -1: all */
    long long most, longest; /* words; bytes of a word, on average, of documents */
    /* The table. */
    uint64_t *slots;         /* half of a word's hash, and its number counted from 1 */
    uint32_t mask, count, num_learned;
    size_t num_ids, num_rest;
    Space entries, ids, rests;
    /* Of a model. */
    int has_model, prefixes, trims;
    Node *nodes;
    uint32_t root;
    uint8_t *symbols;        /* for each piece, whether it is not to be normalized */
    uint32_t *units;         /* the table of normalization, a double array */
    size_t num_units, num_targets;
    uint8_t *targets;
    uint8_t images[256];
    float unknown_score;
    double worst, bonus;
    uint32_t unknown_id, byte_ids[256];
    int has_bytes;
    /* For a while. */
    Space out, ends, held, befores, spelled, choices, arrivals, path;
    size_t num_out, num_spelled;
    int64_t before;          /* ids before the place that is asked about; -1: no word begins there */
    int any_held;
} Words;

static int reserve(Space *space, size_t bytes)
{
    if (bytes <= space->room)
        return DONE;
    size_t room = space->room + space->room / 2;
    if (room < bytes)
        room = bytes;
    void *data = realloc(space->data, room);
    if (data == NULL)
        return FAILED;
    space->data = data;
    space->room = room;
    return DONE;
}

static void drop(Space *space)
{
    free(space->data);
    *space = (Space){NULL, 0};
}

static void drop_all(Words *self)
{
    drop(&self->entries);
    drop(&self->ids);
    drop(&self->rests);
    drop(&self->out);
    drop(&self->ends);
    drop(&self->held);
    drop(&self->befores);
    drop(&self->spelled);
    drop(&self->choices);
    drop(&self->arrivals);
    drop(&self->path);
}

/* The table. */

static const uint8_t FILL[2 * HEAD] = {
    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,
    0,    0,    0,    0,    0,    0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
    0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
};

static inline uint64_t load(const uint8_t *at)
{
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Find the head and the hash of a word. What is behind it is read up to `end`. */
static inline void look_at(const Words *self, Word *word, const uint8_t *end)
{
    const uint8_t *text = word->text;
    uint32_t size = word->size;
    if (size >= HEAD) {
        word->head[0] = load(text);
        word->head[1] = load(text + 8);
    } else if (end - text >= HEAD) {
        word->head[0] = load(text) | load(FILL + HEAD - size);
        word->head[1] = load(text + 8) | load(FILL + HEAD - size + 8);
    } else {
        memset(word->head, 0xFF, HEAD);
        memcpy(word->head, text, size);
    }
    uint64_t hash = mix(word->head[0] ^ self->seeds[0], word->head[1] ^ self->seeds[1] ^ size);
    if (size > HEAD) {
        for (uint32_t done = HEAD; done + 8 < size; done += 8)
            hash = mix(hash ^ load(text + done), self->seeds[1]);
        hash = mix(hash ^ load(text + size - 8), self->seeds[0]);
    }
    word->tag = (uint32_t)(hash >> 32);
}

static int resize(Words *self, uint32_t num_slots)
{
    uint64_t *slots = calloc(num_slots, sizeof *slots);
    if (slots == NULL)
        return FAILED;
    uint32_t mask = num_slots - 1;
    for (size_t i = 0; self->slots != NULL && i <= self->mask; i++) {
        uint64_t slot = self->slots[i];
        uint32_t place = (uint32_t)(slot >> 32) & mask;
        if (slot == 0)
            continue;
        while (slots[place] != 0)
            place = (place + 1) & mask;
        slots[place] = slot;
    }
    free(self->slots);
    self->slots = slots;
    self->mask = mask;
    return DONE;
}

/* Forget all words, and give their memory back. */
static int forget(Words *self)
{
    free(self->slots);
    self->slots = NULL;
    self->count = self->num_learned = 0;
    self->num_ids = self->num_rest = 0;
    drop(&self->entries);
    drop(&self->ids);
    drop(&self->rests);
    return resize(self, FEWEST_SLOTS);
}

static inline Entry *entry_at(const Words *self, uint32_t number)
{
    return (Entry *)self->entries.data + number;
}

static inline uint32_t find(const Words *self, const Word *word)
{
    uint32_t place = word->tag & self->mask;
    for (uint64_t slot; (slot = self->slots[place]) != 0; place = (place + 1) & self->mask) {
        if ((uint32_t)(slot >> 32) != word->tag)
            continue;
        const Entry *entry = entry_at(self, (uint32_t)slot - 1);
        if (entry->head[0] == word->head[0] && entry->head[1] == word->head[1] &&
            entry->size == word->size &&
            (word->size <= HEAD || memcmp((uint8_t *)self->rests.data + entry->rest,
                                          word->text + HEAD, word->size - HEAD) == 0))
            return (uint32_t)slot - 1;
    }
    return NOWHERE;
}

/* Take up a new word, which has no ids yet. */
static int add(Words *self, const Word *word)
{
    size_t rest = word->size > HEAD ? word->size - HEAD : 0;
    if (self->count >= NOWHERE / 4 || self->num_rest + rest > UINT32_MAX ||
        reserve(&self->entries, (self->count + (size_t)1) * sizeof(Entry)) ||
        reserve(&self->rests, self->num_rest + rest))
        return FAILED;
    if (2 * self->count > self->mask && resize(self, 2 * (self->mask + 1)))
        return FAILED;
    Entry *entry = entry_at(self, self->count);
    *entry = (Entry){{word->head[0], word->head[1]}, word->size, 0, 0, 0, 0, UNLEARNED};
    if (rest) {
        entry->rest = (uint32_t)self->num_rest;
        memcpy((uint8_t *)self->rests.data + self->num_rest, word->text + HEAD, rest);
        self->num_rest += rest;
    }
    uint32_t place = word->tag & self->mask;
    while (self->slots[place] != 0)
        place = (place + 1) & self->mask;
    self->slots[place] = (uint64_t)word->tag << 32 | ++self->count;
    return DONE;
}

/* Words of a model, as its pieces write them. */

static inline size_t width_of(uint8_t first)
{
    return first < 0xC0 || first >= 0xFE ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

static inline uint32_t child_of(const Words *self, uint32_t node, uint8_t byte)
{
    uint32_t child = (uint32_t)self->nodes[node].base + byte;
    return (uint32_t)self->nodes[child].parent == node ? child : NOWHERE;
}

/* The size of the longest symbol at the beginning of a text, or 0. */
static size_t symbol_at(const Words *self, const uint8_t *text, size_t size)
{
    size_t longest = 0;
    uint32_t node = self->root;
    for (size_t i = 0; i < size && (node = child_of(self, node, text[i])) != NOWHERE; i++)
        if (self->nodes[node].value >= 0 && self->symbols[self->nodes[node].value])
            longest = i + 1;
    return longest;
}

/* What the longest rule for the beginning of a text makes of it; returns how much it takes. */
static size_t normalized(const Words *self, const uint8_t *text, size_t size,
                         const uint8_t **target, size_t *target_size)
{
    size_t longest = self->symbols == NULL ? 0 : symbol_at(self, text, size), place = 0;
    if (longest == 0) {
        for (size_t i = 0; place < self->num_units; i++) {
            uint32_t unit = self->units[place];
            place ^= (size_t)(unit >> 10) << ((unit & 0x200) >> 6);
            if (i && unit & 0x100 && place < self->num_units) {
                size_t value = self->units[place] & 0x7FFFFFFF;
                if (value < self->num_targets) {
                    longest = i;
                    *target = self->targets + value;
                    const uint8_t *end = memchr(*target, 0, self->num_targets - value);
                    *target_size = end ? (size_t)(end - *target) : self->num_targets - value;
                }
            }
            if (i == size)
                break;
            place ^= text[i];
            if (place >= self->num_units || (self->units[place] & 0x800000FF) != text[i])
                break;
        }
        if (longest)
            return longest;
        longest = width_of(text[0]);
        if (longest > size)
            longest = size;
    }
    *target = text;
    *target_size = longest;
    return longest;
}

/* Write a word into `spelled`; held where it has U+2581. */
static int spell(Words *self, const uint8_t *text, size_t size)
{
    self->num_spelled = 0;
    size_t start = 0;
    while (start < size && self->is_space[text[start]] && (size_t)self->left_out > start)
        start++;
    text += start;
    size -= start;
    if (size == 0)
        return DONE;
    if (reserve(&self->spelled, size + 1))
        return FAILED;
    uint8_t *out = self->spelled.data;
    size_t end = 0;
    uint8_t all = 1;
    if (self->prefixes)
        out[end++] = SPACE;
    for (size_t i = 0; i < size; i++) {
        uint8_t image = self->images[text[i]];
        out[end++] = image;
        all &= image != 0;
    }
    if (!all) {
        int follows_space = self->trims;
        end = self->prefixes;
        for (size_t i = 0; i < size;) {
            if (size - i >= 3 && memcmp(text + i, "\xE2\x96\x81", 3) == 0)
                return HELD;
            const uint8_t *target;
            size_t length;
            i += normalized(self, text + i, size - i, &target, &length);
            while (follows_space && length && *target == ' ') {
                target++;
                length--;
            }
            if (reserve(&self->spelled, end + length + 1))
                return FAILED;
            out = self->spelled.data;
            for (size_t k = 0; k < length; k++)
                out[end++] = target[k] == ' ' ? SPACE : target[k];
            if (length)
                follows_space = self->trims && target[length - 1] == ' ';
        }
    }
    while (self->trims && end && out[end - 1] == SPACE)
        end--;
    self->num_spelled = end;
    return DONE;
}

/* The id of a piece, or those of an unknown character; returns where they end. */
static inline uint32_t *put(const Words *self, uint32_t *ids, const uint8_t *text, size_t from,
                            size_t end, int32_t node, int *was_unknown)
{
    if (node >= 0)
        *ids++ = (uint32_t)self->nodes[node].value;
    else if (self->has_bytes)
        for (size_t i = from; i < end; i++)
            *ids++ = self->byte_ids[text[i]];
    else if (!*was_unknown) /* those in a row share one */
        *ids++ = self->unknown_id;
    *was_unknown = node < 0;
    return ids;
}

/* Put out the best pieces of what is spelled, from a sum on, as the package finds them. */
static int decide(Words *self, float *sum)
{
    const uint8_t *text = self->spelled.data;
    size_t size = self->num_spelled;
    if (reserve(&self->arrivals, (size + 1) * sizeof(Arrival)) ||
        reserve(&self->path, (size + 1) * sizeof(uint32_t)) ||
        reserve(&self->out, (self->num_out + size) * sizeof(uint32_t)))
        return FAILED;
    Arrival *at = self->arrivals.data;
    for (size_t i = 0; i <= size; i++)
        at[i] = (Arrival){0, -1, -1};
    at[0].best = *sum;
    for (size_t i = 0; i < size;) {
        if (at[i].best < -RESET) {
            float lowest = at[i].best;
            for (size_t j = i; j <= size; j++)
                at[j].best -= lowest;
        }
        float before = at[i].best;
        size_t width = width_of(text[i]), first = i;
        int is_known = 0;
        uint32_t node = self->root;
        for (size_t j = i; j < size && (node = child_of(self, node, text[j])) != NOWHERE;) {
            j++;
            if (self->nodes[node].value < 0)
                continue;
            float found = before + self->nodes[node].score;
            if (at[j].from < 0 || found > at[j].best)
                at[j] = (Arrival){found, (int32_t)i, (int32_t)node};
            is_known |= j - i == width;
        }
        i = width < size - i ? i + width : size;
        float found = before + self->unknown_score;
        if (!is_known && (at[i].from < 0 || found > at[i].best))
            at[i] = (Arrival){found, (int32_t)first, -1};
    }
    *sum = at[size].best;
    uint32_t *path = self->path.data, *out = (uint32_t *)self->out.data + self->num_out;
    size_t length = 0;
    for (size_t i = size; i > 0; i = (size_t)at[i].from)
        path[length++] = (uint32_t)i;
    for (int was_unknown = 0; length--;) {
        const Arrival *end = at + path[length];
        out = put(self, out, text, (size_t)end->from, path[length], end->node, &was_unknown);
    }
    self->num_out = (size_t)(out - (uint32_t *)self->out.data);
    return DONE;
}

static inline void choose(Choice *choice, double found, size_t from, int32_t node)
{
    if (found > choice->best)
        *choice = (Choice){found, choice->best, (int32_t)from, node};
    else if (found > choice->next)
        choice->next = found;
}

/* Keep the best pieces of what is spelled, and up to which sum after it, in size, they are these.

   Two ways through a part of a word that no piece reaches into or out of have at most as many
   additions as it has bytes, each. Hardly a score is above 0, so that no sum on the way is much
   larger than the last. */
static int learn(Words *self, Entry *entry)
{
    const uint8_t *text = self->spelled.data;
    size_t size = self->num_spelled;
    if (self->num_ids + 2 * size + 1 > UINT32_MAX ||
        reserve(&self->choices, (size + 1) * sizeof(Choice)) ||
        reserve(&self->path, (size + 1) * sizeof(uint32_t)) ||
        reserve(&self->ids, (self->num_ids + 2 * size + 1) * sizeof(uint32_t)))
        return FAILED;
    Choice *at = self->choices.data;
    for (size_t i = 0; i <= size; i++)
        at[i] = (Choice){-INFINITY, -INFINITY, -1, -1};
    double gap = INFINITY;
    for (size_t i = 0, begin = 0, reach = 0;;) {
        if (i == reach) { /* a part ends */
            for (size_t j = i; j > begin; j = (size_t)at[j].from)
                gap = fmin(gap, (at[j].best - at[j].next) / (double)(i - begin));
            at[i].best = 0;
            begin = i;
        }
        if (i == size)
            break;
        double before = at[i].best;
        size_t width = width_of(text[i]), first = i;
        int is_known = 0;
        uint32_t node = self->root;
        for (size_t j = i; j < size && (node = child_of(self, node, text[j])) != NOWHERE;) {
            j++;
            if (self->nodes[node].value < 0)
                continue;
            choose(at + j, before + (double)self->nodes[node].score, i, (int32_t)node);
            is_known |= j - i == width;
            reach = j > reach ? j : reach;
        }
        i = width < size - i ? i + width : size;
        if (!is_known) {
            choose(at + i, before + (double)self->unknown_score, first, -1);
            reach = i > reach ? i : reach;
        }
    }
    /* Nor may a sum on any way come to a reset. */
    double limit = fmin((gap - 1e-9) / (2.002 * HALF_ULP) - 2 * self->bonus,
                        RESET - self->worst * (double)(size + 1) - self->bonus);
    float bound = (float)(limit - fabs(limit) * 1e-6);
    uint32_t *path = self->path.data, *ids = (uint32_t *)self->ids.data + self->num_ids;
    size_t length = 0;
    for (size_t i = size; i > 0; i = (size_t)at[i].from)
        path[length++] = (uint32_t)i;
    memcpy(ids++, &bound, sizeof bound);
    entry->ids = (uint32_t)self->num_ids + 1;
    int was_unknown = 0;
    for (size_t k = length; k--;)
        ids = put(self, ids, text, (size_t)at[path[k]].from, path[k], at[path[k]].node,
                  &was_unknown);
    entry->num_ids = (uint16_t)(ids - (uint32_t *)self->ids.data - entry->ids);
    for (size_t k = length; k--; ids++) {
        int32_t node = at[path[k]].node;
        memcpy(ids, node < 0 ? &self->unknown_score : &self->nodes[node].score, sizeof(float));
    }
    entry->num_scores = (uint8_t)length;
    entry->state = LEARNED;
    self->num_ids = (size_t)(ids - (uint32_t *)self->ids.data);
    return DONE;
}

/* Learn a word of a model that is not too long. */
static int learn_word(Words *self, const Word *word, uint32_t *number)
{
    int state = spell(self, word->text, word->size);
    if (state == FAILED)
        return FAILED;
    *number = NOWHERE;
    if (state == DONE && self->num_spelled >= LONGEST_SPELLED)
        return DONE;
    if (add(self, word))
        return FAILED;
    *number = self->count - 1;
    self->num_learned = self->count;
    entry_at(self, *number)->state = DELICATE;
    return state == HELD ? DONE : learn(self, entry_at(self, *number));
}

/* Documents. */

typedef struct {
    const uint8_t *at, *stop; /* what is left of it */
    const uint8_t *last;      /* where its last word ends, but for spaces that stay with it */
    const uint8_t *place;     /* a place in it that is asked about */
    float sum;                /* of the scores so far */
} Document;

static inline int put_known(Words *self, const Entry *entry, Document *document)
{
    const uint32_t *ids = (uint32_t *)self->ids.data + entry->ids;
    if (reserve(&self->out, (self->num_out + entry->num_ids) * sizeof(uint32_t)))
        return FAILED;
    if (self->has_model) {
        float sum = document->sum, bound;
        memcpy(&bound, ids - 1, sizeof bound);
        for (size_t k = 0; k < entry->num_scores; k++) {
            float score;
            memcpy(&score, ids + entry->num_ids + k, sizeof score);
            sum += score;
        }
        if (!(fabsf(sum) <= bound))
            return HELD;
        document->sum = sum;
    }
    uint32_t *out = (uint32_t *)self->out.data + self->num_out;
    for (size_t k = 0; k < entry->num_ids; k++)
        out[k] = ids[k];
    self->num_out += entry->num_ids;
    return DONE;
}

static int put_word(Words *self, const Word *word, uint32_t number, Document *document)
{
    int is_kept = !self->has_model || word->size <= LONGEST_KEPT;
    if (number == NOWHERE && is_kept) {
        number = find(self, word); /* one of the same group may have brought it */
        if (number == NOWHERE && self->has_model) {
            if (learn_word(self, word, &number))
                return FAILED;
        } else if (number == NOWHERE)
            return add(self, word);
    }
    if (number != NOWHERE) {
        const Entry *entry = entry_at(self, number);
        if (entry->state != LEARNED)
            return entry->state == DELICATE ? HELD : DONE;
        int state = put_known(self, entry, document);
        if (state != HELD)
            return state;
    }
    if (word->size > LONGEST_WORD)
        return HELD;
    int state = spell(self, word->text, word->size);
    return state == DONE ? decide(self, &document->sum) : state;
}

static int encode_document(Words *self, Document document, const uint8_t *end)
{
    const uint8_t *is_space = self->is_space, *at = document.at;
    Word words[GROUP];
    uint32_t numbers[GROUP];
    while (at < document.stop) {
        int count = 0;
        for (; count < GROUP && at < document.stop; count++) {
            Word *word = words + count;
            word->text = at;
            while (at < document.stop && is_space[*at])
                at++;
            while (at < document.stop && !is_space[*at])
                at++;
            if (at == document.last)
                at = document.stop;
            word->size = (uint32_t)(at - word->text);
            look_at(self, word, end);
            __builtin_prefetch(self->slots + (word->tag & self->mask));
        }
        for (int i = 0; i < count; i++) {
            uint64_t slot = self->slots[words[i].tag & self->mask];
            if (slot)
                __builtin_prefetch(entry_at(self, (uint32_t)slot - 1));
        }
        for (int i = 0; i < count; i++) {
            numbers[i] = find(self, words + i);
            if (numbers[i] != NOWHERE)
                __builtin_prefetch((uint32_t *)self->ids.data + entry_at(self, numbers[i])->ids);
        }
        for (int i = 0; i < count; i++) {
            if (words[i].text == document.place)
                self->before = (int64_t)self->num_out;
            int state = put_word(self, words + i, numbers[i], &document);
            if (state != DONE)
                return state;
        }
    }
    return DONE;
}

/* Whether words of a document are as long, on average, as those of a script without spaces. */
static int has_long_words(const Words *self, const uint8_t *text, size_t size)
{
    size_t count = size > 0;
    for (size_t i = 1; i < size; i++)
        count += self->is_space[text[i]] & !self->is_space[text[i - 1]];
    return (long long)size > self->longest * (long long)count;
}

/* Put out a document; nothing of one that is held. What is behind it is read up to `end`. */
static int encode_text(Words *self, const uint8_t *text, size_t size, const uint8_t *end,
                       const uint8_t *place)
{
    size_t before = self->num_out;
    Document document = {text, text + size, NULL, place, 0};
    int state = DONE;
    self->before = -1;
    if (size > LONGEST_DOCUMENT || (self->longest && has_long_words(self, text, size)))
        state = HELD;
    if (self->left_out == 1 && size) {
        /* No space may be left out of a word that begins a document, and one that ends it alone
           would be nothing, so it stays with the word before. */
        if (self->is_space[*text])
            state = HELD;
        document.last = document.stop;
        while (document.last > text && self->is_space[document.last[-1]])
            document.last--;
    }
    if (state == DONE)
        state = encode_document(self, document, end);
    if (state == HELD)
        self->num_out = before;
    return state;
}

/* Begin with so many documents. Words that were handed out, but not learned, are forgotten. */
static int begin(Words *self, size_t count)
{
    if (self->num_learned < self->count && forget(self))
        return FAILED;
    if (reserve(&self->ends, (count + 1) * sizeof(int64_t)) || reserve(&self->held, count) ||
        reserve(&self->befores, count * sizeof(int64_t)))
        return FAILED;
    self->num_out = 0;
    self->any_held = 0;
    *(int64_t *)self->ends.data = 0;
    return DONE;
}

/* Take down how it went with one of them. */
static void note(Words *self, size_t place, int state)
{
    ((uint8_t *)self->held.data)[place] = state == HELD;
    ((int64_t *)self->ends.data)[place + 1] = (int64_t)self->num_out;
    ((int64_t *)self->befores.data)[place] = state == HELD ? -1 : self->before;
    self->any_held |= state == HELD;
}

/* What Python sees. */

static PyObject *new_words(Words *self)
{
    PyObject *found = PyList_New(self->count - self->num_learned);
    for (uint32_t i = self->num_learned; found != NULL && i < self->count; i++) {
        const Entry *entry = entry_at(self, i);
        uint32_t head = entry->size < HEAD ? entry->size : HEAD;
        PyObject *word = PyBytes_FromStringAndSize(NULL, entry->size);
        if (word == NULL) {
            Py_CLEAR(found);
            break;
        }
        char *bytes = PyBytes_AsString(word);
        memcpy(bytes, entry->head, head);
        if (entry->size > HEAD)
            memcpy(bytes + HEAD, (char *)self->rests.data + entry->rest, entry->size - HEAD);
        PyList_SetItem(found, i - self->num_learned, word);
    }
    return found;
}

static int check_offsets(const Py_buffer *data, const Py_buffer *offsets)
{
    const int64_t *bounds = offsets->buf;
    size_t count = (size_t)offsets->len / sizeof *bounds;
    int is_right = count && offsets->len % sizeof *bounds == 0 &&
                   (uintptr_t)bounds % _Alignof(int64_t) == 0 && bounds[0] >= 0 &&
                   bounds[count - 1] <= data->len;
    for (size_t i = 1; is_right && i < count; i++)
        is_right = bounds[i - 1] <= bounds[i];
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "offsets must ascend within the data");
    return is_right;
}

static int take(Words *self)
{
    if (self->is_busy || self->slots == NULL) {
        PyErr_SetString(PyExc_RuntimeError, self->is_busy ? "another thread uses these words"
                                                          : "these words were never made");
        return 0;
    }
    return self->is_busy = 1;
}

/* What was found for so many documents. */
static PyObject *answer(Words *self, size_t count, int has_places)
{
    if (self->num_learned < self->count)
        return new_words(self);
    PyObject *ids = PyByteArray_FromStringAndSize(
        self->out.data, (Py_ssize_t)(self->num_out * sizeof(uint32_t)));
    PyObject *ends = PyByteArray_FromStringAndSize(
        self->ends.data, (Py_ssize_t)((count + 1) * sizeof(int64_t)));
    PyObject *found = Py_BuildValue("NNy#y#", ids, ends,
                                    self->any_held ? (char *)self->held.data : NULL,
                                    (Py_ssize_t)count,
                                    has_places ? (char *)self->befores.data : NULL,
                                    (Py_ssize_t)(count * sizeof(int64_t)));
    size_t num_bytes = self->num_ids * sizeof(uint32_t) + self->num_rest;
    if ((self->count > self->most || num_bytes > MOST_BYTES) && forget(self)) {
        Py_CLEAR(found);
        PyErr_NoMemory();
    }
    return found;
}

PyDoc_STRVAR(encode_doc,
             "encode(data, offsets, places): ids and offsets of documents, which are left to the\n"
             "reference (None: none), and, if places in the data are given, how many ids of all are\n"
             "before the word of each document that begins at its place, -1 where none does; or a\n"
             "list of new words, to be learned first.");
static PyObject *words_encode(PyObject *object, PyObject *args)
{
    Words *self = (Words *)object;
    Py_buffer data, offsets, places = {0};
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(args, "y*y*|y*", &data, &offsets, &places))
        return NULL;
    if (places.obj != NULL && (places.len != offsets.len - (Py_ssize_t)sizeof(int64_t) ||
                               (uintptr_t)places.buf % _Alignof(int64_t)))
        PyErr_SetString(PyExc_ValueError, "there must be one place for each document");
    else if (check_offsets(&data, &offsets) && take(self)) {
        size_t count = (size_t)offsets.len / sizeof(int64_t) - 1;
        const int64_t *bounds = offsets.buf;
        const uint8_t *bytes = data.buf;
        const int64_t *marks = places.buf;
        int state;
        Py_BEGIN_ALLOW_THREADS
        state = begin(self, count);
        for (size_t i = 0; state != FAILED && i < count; i++) {
            size_t size = (size_t)(bounds[i + 1] - bounds[i]);
            int is_asked = marks && marks[i] >= bounds[i] && marks[i] < bounds[i + 1];
            state = encode_text(self, bytes + bounds[i], size, bytes + data.len,
                                is_asked ? bytes + marks[i] : NULL);
            note(self, i, state);
        }
        Py_END_ALLOW_THREADS
        found = state == FAILED ? PyErr_NoMemory() : answer(self, count, marks != NULL);
        self->is_busy = 0;
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&places);
    return found;
}

PyDoc_STRVAR(encode_texts_doc, "encode_texts(texts): the same of a few strings, in a list.");
static PyObject *words_encode_texts(PyObject *object, PyObject *texts)
{
    Words *self = (Words *)object;
    if (!PyList_Check(texts)) {
        PyErr_SetString(PyExc_TypeError, "texts must be a list");
        return NULL;
    }
    if (!take(self))
        return NULL;
    size_t count = (size_t)PyList_Size(texts);
    int state = begin(self, count);
    if (state == FAILED)
        PyErr_NoMemory();
    for (size_t i = 0; state != FAILED && i < count; i++) {
        /* Not by `PyUnicode_AsUTF8AndSize`, which keeps the bytes with the string. */
        PyObject *text = PyList_GetItem(texts, (Py_ssize_t)i), *data = NULL;
        char *bytes;
        Py_ssize_t size;
        state = FAILED;
        if (text == NULL || (data = PyUnicode_AsUTF8String(text)) == NULL ||
            PyBytes_AsStringAndSize(data, &bytes, &size))
            break;
        state = encode_text(self, (uint8_t *)bytes, (size_t)size, (uint8_t *)bytes + size, NULL);
        note(self, i, state);
        Py_DECREF(data);
        if (state == FAILED)
            PyErr_NoMemory();
    }
    PyObject *found = state == FAILED ? NULL : answer(self, count, 0);
    self->is_busy = 0;
    return found;
}

PyDoc_STRVAR(learn_doc,
             "learn(ids, starts, lengths, marks): the ids of the new words, in 32 bits, where those\n"
             "of each begin and how many they are, in 64, and for each whether only the reference\n"
             "may encode documents with it.");
static PyObject *words_learn(PyObject *object, PyObject *args)
{
    Words *self = (Words *)object;
    Py_buffer ids, starts, lengths, marks;
    if (!PyArg_ParseTuple(args, "y*y*y*y*", &ids, &starts, &lengths, &marks))
        return NULL;
    int is_right = 0;
    if (take(self)) {
        size_t count = self->count - self->num_learned, most = (size_t)ids.len / sizeof(uint32_t);
        const int64_t *firsts = starts.buf, *sizes = lengths.buf;
        is_right = (size_t)starts.len == count * sizeof(int64_t) && starts.len == lengths.len &&
                   (size_t)marks.len == count && (uintptr_t)firsts % _Alignof(int64_t) == 0 &&
                   (uintptr_t)sizes % _Alignof(int64_t) == 0;
        for (size_t i = 0; is_right && i < count; i++)
            is_right = firsts[i] >= 0 && sizes[i] >= 0 && (size_t)firsts[i] <= most &&
                       (size_t)sizes[i] <= most - (size_t)firsts[i];
        if (!is_right)
            PyErr_SetString(PyExc_ValueError, "these are not the ids of the new words");
        for (size_t i = 0; is_right && i < count; i++) {
            Entry *entry = entry_at(self, self->num_learned);
            size_t size = (size_t)sizes[i] > MANY ? 0 : (size_t)sizes[i];
            if (self->num_ids + size > UINT32_MAX ||
                reserve(&self->ids, (self->num_ids + size + 1) * sizeof(uint32_t))) {
                PyErr_NoMemory();
                is_right = 0;
                break;
            }
            memcpy((uint32_t *)self->ids.data + self->num_ids,
                   (uint32_t *)ids.buf + firsts[i], size * sizeof(uint32_t));
            entry->ids = (uint32_t)self->num_ids;
            entry->num_ids = (uint16_t)size;
            entry->state =
                ((uint8_t *)marks.buf)[i] || (size_t)sizes[i] > MANY ? DELICATE : LEARNED;
            self->num_ids += size;
            self->num_learned++;
        }
        self->is_busy = 0;
    }
    PyBuffer_Release(&ids);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&marks);
    if (!is_right)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(forget_doc, "forget(): forget all words, and give their memory back.");
static PyObject *words_forget(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Words *self = (Words *)object;
    if (!take(self))
        return NULL;
    int state = forget(self);
    drop_all(self);
    self->is_busy = 0;
    if (state == FAILED)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static Py_ssize_t words_length(PyObject *object)
{
    return ((Words *)object)->count;
}

static void *copied(const Py_buffer *buffer)
{
    void *found = malloc(buffer->len ? (size_t)buffer->len : 1);
    if (found != NULL)
        memcpy(found, buffer->buf, (size_t)buffer->len);
    else
        PyErr_NoMemory();
    return found;
}

/* Take a model: (nodes, root, symbols, charsmap, images, byte_ids, unknown_score, worst, bonus,
   unknown_id, prefixes, trims), as `words.py` has them. */
static int take_model(Words *self, PyObject *model)
{
    Py_buffer nodes, symbols, charsmap, images, byte_ids;
    if (!PyArg_ParseTuple(model, "y*Iy*y*y*y*fddIpp", &nodes, &self->root, &symbols, &charsmap,
                          &images, &byte_ids, &self->unknown_score, &self->worst, &self->bonus,
                          &self->unknown_id, &self->prefixes, &self->trims))
        return 0;
    size_t count = (size_t)nodes.len / sizeof(Node), units = 0;
    const uint8_t *table = charsmap.buf;
    if (charsmap.len >= 4)
        units = (table[0] | table[1] << 8 | table[2] << 16 | (size_t)table[3] << 24) / 4;
    int is_right = count > 0 && count < INT32_MAX && (size_t)nodes.len == count * sizeof(Node) &&
                   self->root < count && images.len == 256 &&
                   (byte_ids.len == 0 || byte_ids.len == sizeof self->byte_ids) &&
                   (charsmap.len == 0 || 4 + 4 * units <= (size_t)charsmap.len);
    const Node *node = nodes.buf;
    for (size_t i = 0; is_right && i < count; i++)
        is_right = node[i].base >= 0 && (size_t)node[i].base + 256 <= count &&
                   node[i].value >= -1 && node[i].value < (int64_t)symbols.len &&
                   node[i].score <= 1e4f && node[i].score >= -1e4f;
    if (is_right) {
        int has_symbols = memchr(symbols.buf, 1, (size_t)symbols.len) != NULL;
        self->has_model = 1;
        self->nodes = copied(&nodes);
        self->units = copied(&charsmap);
        self->symbols = has_symbols ? copied(&symbols) : NULL;
        memcpy(self->images, images.buf, sizeof self->images);
        self->has_bytes = byte_ids.len > 0;
        memcpy(self->byte_ids, byte_ids.buf, (size_t)byte_ids.len);
        if (self->units != NULL && charsmap.len) {
            self->num_units = units;
            self->num_targets = (size_t)charsmap.len - 4 - 4 * units;
            for (size_t i = 0; i < units; i++) {
                const uint8_t *unit = table + 4 + 4 * i;
                self->units[i] =
                    unit[0] | unit[1] << 8 | unit[2] << 16 | (uint32_t)unit[3] << 24;
            }
            self->targets = (uint8_t *)(self->units + units);
            memmove(self->targets, table + 4 + 4 * units, self->num_targets);
        }
    } else
        PyErr_SetString(PyExc_ValueError, "the model is not one");
    PyBuffer_Release(&nodes);
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&charsmap);
    PyBuffer_Release(&images);
    PyBuffer_Release(&byte_ids);
    return !PyErr_Occurred();
}

PyDoc_STRVAR(words_doc,
             "Words(spaces, left_out, most, longest, seed, model): a table of `most` words.\n"
             "Documents with words longer than `longest` on average are left to the reference.");
static int words_init(PyObject *object, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    Words *self = (Words *)object;
    Py_buffer spaces;
    unsigned long long seed;
    PyObject *model;
    if (self->slots != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "these words were made already");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "y*iLLKO", &spaces, &self->left_out, &self->most, &self->longest,
                          &seed, &model))
        return -1;
    self->seeds[0] = seed;
    self->seeds[1] = mix(seed ^ 0x9E3779B97F4A7C15u, 0xD1B54A32D192ED03u) | 1;
    for (Py_ssize_t i = 0; i < spaces.len; i++)
        self->is_space[((uint8_t *)spaces.buf)[i]] = 1;
    PyBuffer_Release(&spaces);
    if (model != Py_None && !take_model(self, model))
        return -1;
    if (forget(self)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void words_dealloc(PyObject *object)
{
    Words *self = (Words *)object;
    PyTypeObject *type = Py_TYPE(object);
    drop_all(self);
    free(self->slots);
    free(self->nodes);
    free(self->symbols);
    free(self->units);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"encode", words_encode, METH_VARARGS, encode_doc},
    {"encode_texts", words_encode_texts, METH_O, encode_texts_doc},
    {"learn", words_learn, METH_VARARGS, learn_doc},
    {"forget", words_forget, METH_NOARGS, forget_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)words_doc},   {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, words_init},         {Py_tp_dealloc, words_dealloc},
    {Py_sq_length, words_length},     {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec type_spec = {
    "tokenmill.engines.kernel.Words", sizeof(Words), 0, Py_TPFLAGS_DEFAULT, type_slots,
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "kernel", "The compiled part of the engine `words`.",
    -1,                    NULL,     NULL,
    NULL,                  NULL,     NULL,
};

PyMODINIT_FUNC PyInit_kernel(void)
{
    PyObject *module = PyModule_Create(&module_definition), *type = PyType_FromSpec(&type_spec);
    if (module == NULL || type == NULL || PyModule_AddObjectRef(module, "Words", type) ||
        PyModule_AddIntConstant(module, "INTERFACE", INTERFACE))
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
