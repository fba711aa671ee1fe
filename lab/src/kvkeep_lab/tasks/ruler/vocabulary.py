"""English words for keys and lists: RULER takes those of the package wonderwords; these few are our own."""

from __future__ import annotations


def _listed(text: str) -> list[str]:
    return text.split()


NOUNS: list[str] = _listed("""
acorn actor airport album anchor ankle antler apple apron arch armor arrow artist atlas attic author autumn avenue
axle bakery balcony balloon bamboo banana banner barn barrel basin basket battery beacon beach bean beard beaver
bell belt bench berry bicycle blanket blossom boat bonnet book boot border bottle boulder bowl box branch brass
bread breeze brick bridge broom brush bucket buffalo bugle button cabin cable cactus camel camera candle canoe
canvas canyon captain caravan carpet carriage castle cave cedar cellar cement chain chair chalk chapel cherry
chimney circle circus cliff clinic cloak clock cloud clover coal coast cobweb collar comet compass copper coral
cottage cotton cradle crane crater crayon creek cricket crown crystal cupboard curtain cushion daisy dancer deer
desert desk diamond dinner doctor donkey door dragon drawer drum eagle easel echo elbow elm engine envelope falcon
farmer feather fence fern ferry fiddle field finger fisher flag flame flask flute forest fork fossil fountain frog
furnace galaxy garden gate ginger glacier glove goat grape gravel guitar hammer harbor harp hawk hedge helmet heron
hill honey horizon hotel island ivory jacket jar jewel journal jungle kettle key kitchen kite ladder lagoon lake
lamp lantern leaf lemon letter library lighthouse lily lion lizard locket lunch magnet mango map maple marble
market meadow melon mill mirror mitten moon moose mountain museum mustard napkin needle nest notebook oak oasis oat
ocean olive onion orchard otter oven owl oyster paddle palace panther paper parade parcel parrot pasture pebble
pelican pencil pepper piano pigeon pillow pilot pine planet plate plum pocket pond poppy porch potato prairie
puddle pumpkin quarry quilt rabbit raft railway rain raven ribbon river robin rocket roof rope rose sail salmon
sandal saucer scarf school seed shadow shark shell shepherd shore shovel singer sparrow spider spoon stable statue
street sugar swan table tailor teapot temple thimble thunder tiger timber tower trumpet tulip tunnel turtle
umbrella valley vase velvet village violin volcano wagon walnut walrus water whale wheat wheel whistle willow
window winter wizard wolf
""")

ADJECTIVES: list[str] = _listed("""
able absent active agile alert amber ancient angry ample ashen autumnal awake bald bare basic bitter blank bleak
blind blunt bold brave brief bright brisk brittle broad broken bronze busy calm careful cautious cheap cheerful
chilly clean clear clever cloudy clumsy coarse cold common complex cosy crisp crooked cruel curious curly damp
daring dark dear deep delicate dense dim distant dizzy double dry dull dusty eager early easy elegant empty equal
exact fair faint faithful famous fancy fast fearless fierce firm flat fond formal fragile frank free fresh friendly
frosty frozen full funny gentle giant glad gloomy golden good graceful grand grateful great greedy green grim
handsome handy happy hard hasty heavy hidden high hollow honest humble hungry icy idle jolly joyful keen kind large
late lazy lean light little lively local lonely long loud lovely loyal lucky mad massive mellow merry mild modern
modest muddy narrow neat nervous new nice nimble noble noisy odd old open orange orderly pale patient peaceful
perfect plain playful pleasant polite poor proud pure purple quaint quick quiet rapid rare raw ready red rich ripe
rough round royal rude rusty sacred safe salty scarce secret serious shallow sharp shiny short shy silent silky
silver simple sleepy slender slim slow small smooth soft solid sour spare spicy steady steep stern stiff strange
strict strong sturdy sudden sunny sweet swift tall tame tart tender thick thin thirsty tidy tiny tired tough true
twin ugly unique useful vague vain vast vivid warm weak weary wet wide wild wise witty wooden worthy young
""")

VERBS: list[str] = _listed("""
accept admire admit adopt advise agree allow amuse announce appear argue arrange arrive ask attach avoid bake
balance bark bathe beg begin believe belong blink boil borrow bounce bow breathe bring build burn bury buy carry
carve catch cheer chew choose chop climb cling collect combine compare complain confess connect consider contain
cook copy count cover crawl cry dance dare decide decorate defend deliver depend describe dig discover divide dream
drift drink drive drown earn eat employ enjoy enter escape examine excuse exist expand expect explain explore fade
fail fall fasten fetch fight fill find fix float flow fly fold follow forget forgive gather give glow grab greet
grow guard guess guide hang happen harvest hear heal help hesitate hide hope hug hum hunt hurry imagine improve
inform invent invite join juggle jump kneel knit knock laugh launch learn leave lend lift listen load mend mix move
multiply notice obey observe offer order owe own pack paint pause peel perform permit plant polish pour practise
praise pray prefer prepare press pretend prevent promise protect prove pull push race reach read receive remain
remember remove repair repeat replace reply rescue rest return ride rinse rise roar roll rub run rush sail scatter
scold scrape scream search sell send settle sew shake share shave shelter shiver shout show sing sip sit sketch
skip sleep slide smell smile sneeze sniff speak spill spin sprinkle squeeze stand stare start stay stir stop
stretch study succeed suffer suggest supply surprise swim teach tell thank think throw touch train travel tremble
trust try turn twist unite unlock visit wait wander warn wash wave weave weep welcome whisper win wink wonder worry
wrap write yawn yell
""")

WORDS: list[str] = sorted({*NOUNS, *ADJECTIVES, *VERBS})
