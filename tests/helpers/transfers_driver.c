// Starts transfers from several threads at the same time, for sanitizers: test_native.py compiles this with
// transfers.c, which it includes. Then lists the files with listing.c, and renames each. The argument is a folder.
// Prints how many copies, events and errors there were, the largest integer, and how many files have another name.

#include "transfers.c"
#include "listing.c"

#define USERS 6
#define TURNS 200
#define ROW 64

static atomic_long copies, events, errors, queries;
static _Atomic uint64_t largest;
static char target[USERS << 19];
static const char* folder;

static int use(void* context) { return context != NULL; }

static int copy(const void* what, void* stream) {
    const Copy* c = what;
    const char* from = c->source_type == HOST ? c->source_host : (const char*)c->source_device;
    char* to = c->target_type == HOST ? c->target_host : (char*)c->target_device;
    for (size_t row = 0; row < c->rows; row++)
        memcpy(to + row * c->target_pitch, from + row * c->source_pitch, c->width);
    copies++;
    return stream != NULL;
}

static int record(void* event, void* stream) {
    if (!event) events++;
    return stream != NULL;
}

static int make(void** event, unsigned flags) {
    *event = malloc(flags);
    return !*event;
}

static int pin(void* memory, size_t nbytes, unsigned flags) { return !memory || !nbytes || !flags; }

static int query(void* event) { return event && queries++ % 2 ? NOT_READY : 0; }

static Device device_at(char* there, int64_t pitch, int64_t width, int64_t take) {
    return (Device){.use = use,
                    .copy = copy,
                    .record = record,
                    .make = make,
                    .query = query,
                    .pin = pin,
                    .there = (uint64_t)there,
                    .pitch = pitch,
                    .integers = INT16,
                    .largest = &largest,
                    .width = width,
                    .take = take,
                    .step = 8192};
}

static void* user(void* number) {
    long id = (long)number;
    char path[256], *memory = calloc(1, 1 << 21);
    ((int16_t*)memory)[2048 + id] = (int16_t)(-1000 - id);
    int length = snprintf(path, sizeof path, "%s/%ld", folder, id) + 1;
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    if (write(file, memory, 1 << 21) != 1 << 21) errors++;
    close(file);
    for (int turn = 0; turn < TURNS; turn++) {
        char paths[8 * sizeof path];
        Job jobs[8];
        int count = 1 + turn % 8;
        for (int i = 0; i < count; i++) {
            memcpy(paths + i * length, path, length);
            jobs[i] = (Job){turn * 4096 % 65536, 4096 << turn % 4, 1 + turn % 4, 1 << 17};
        }
        Device device = device_at(target + (id << 19), ROW, jobs[0].nbytes, ROW);
        Transfer* transfer = transfers_start(paths, jobs, count, O_RDONLY, memory, 1 + turn % 3, turn % 3 ? 1 : 2,
                                             turn % 2 ? &device : NULL);
        if (turn % 5 == 0)
            while (!transfers_ended(transfer)) continue;
        if (transfers_end(transfer)) errors++;
    }
    // A file that comes from the device, whose rows are wider there than in the file. Some are filled up with zeros.
    char* there = calloc(1, 1 << 19);
    for (int i = 0; i < 1 << 19; i++) there[i] = (char)(i * 31 + id);
    for (int turn = 0; turn < TURNS; turn++) {
        int64_t rows = 1 + turn * 7 % 100, width = ROW * (1 + turn % 40);
        int64_t take = width - turn % 3 * ROW / 4, size = rows * width + turn % 2 * 1000;
        Job job = {0, rows * width, 1, size};
        Device device = device_at(there, width + ROW, width, take);
        Transfer* transfer = transfers_start(path, &job, 1, O_WRONLY | O_CREAT | O_TRUNC, NULL, 1, 1, &device);
        if (transfers_end(transfer)) errors++;
        file = open(path, O_RDONLY);
        if (read(file, memory, 1 << 21) != size) errors++;
        close(file);
        for (int64_t i = 0; i < size; i++) {
            int held = i < rows * width && i % width < take;
            if (memory[i] != (held ? there[i / width * (width + ROW) + i % width] : 0)) errors++;
        }
    }
    free(there);
    free(memory);
    return NULL;
}

// Lists the folder seven files at a time, gives each file another name, and returns how many have one.
static long rename_all(void) {
    enum { MANY = 7, MOST = 64 };
    static int64_t numbers[NUMBERS * MANY];
    static int64_t names[IN_NAME * MANY];
    static int64_t at[MANY];
    static char folders[4096];
    int64_t state[] = {[FOLDER] = 0, [NAME] = 0, [OPEN] = 0, [ERROR] = 0};
    static char pairs[MOST * 2 * 4096];
    int64_t count, all = 0;
    size_t end = 0;
    snprintf(folders, sizeof folders, "%s", folder);
    while ((count = listing_files(folders, 1, "*", MANY, state, at, numbers, names)) > 0) {
        if (state[ERROR] != 0) return -1;
        for (int64_t i = 0; i < count && all < MOST; i++, all++) {
            if (numbers[NUMBERS * i] < 0) return -1;
            const long name = (long)names[IN_NAME * i];
            end += (size_t)sprintf(pairs + end, "%s/%ld", folder, name) + 1;
            end += (size_t)sprintf(pairs + end, "%s/%ld.new", folder, name) + 1;
        }
    }
    listing_close(state);
    int64_t* const found = malloc(sizeof(int64_t) * NUMBERS * (size_t)all);
    const long renamed = (long)listing_rename(pairs, all, found);
    free(found);
    return renamed;
}

// Counts an error where a processor without AVX2 would find other magnitudes, in parts that begin anywhere.
static void compare_magnitudes(void) {
    static const int64_t types[] = {INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64};
    static int64_t held[512];
    char* bytes = (char*)held;
    uint32_t random = 1;
    for (size_t i = 0; i < sizeof held; i++) bytes[i] = (char)((random = random * 1664525 + 1013904223) >> 24);
    for (size_t type = 0; type < sizeof types / sizeof *types; type++) {
        int64_t size = types[type] < 0 ? -types[type] : types[type];
        for (int64_t first = 0; first < 40; first++)
            for (int64_t some = 0; some < 80; some += 7) {
                const char* at = bytes + first * size;
                if (largest_of(types[type], at, some * size) != largest_anywhere(types[type], at, some * size))
                    errors++;
            }
    }
}

int main(int count, char** arguments) {
    pthread_t users[USERS];
    folder = arguments[count - 1];
    transfers_limit(5);
    for (long i = 0; i < USERS; i++) pthread_create(&users[i], NULL, user, (void*)i);
    for (int i = 0; i < USERS; i++) pthread_join(users[i], NULL);
    compare_magnitudes();
    printf("%ld %ld %ld %ld %ld\n", (long)copies, (long)events, (long)errors, (long)largest, rename_all());
}
