"""The verbs: English | past | Korean stem | irregular class | objects, or subjects where there is no object | marks.

`@tag` stands for every noun with that tag, `-word` takes one away. Marks: by=… who does it where it is not people;
hon=… the honorific stem; humble=… the stem when it is done for somebody honoured; not=… the stem of its negation;
state (no progressive, no place, no manner); noshort (no 안 before it); short (안 although it ends in 하다); quick (no
progressive); how=… the manners it may be done in; with=… what it may be done with; in=… where it may be done; company
(it may be done with somebody); feeds=… the objects it has when animals do it; asserted (not negated: Korean would say
못); thetic (the whole event is news, so its subject takes 이/가 even when known); 가, 에, 로 (the particle of the
object); says=… the subject that Korean has where English says `it`.
"""

from __future__ import annotations

__all__ = ["DITRANSITIVE", "INTRANSITIVE", "MOTION", "REPORTING", "TRANSITIVE", "WEATHER"]

TRANSITIVE = """
eat | ate | 먹 | | @food @meal | by=@person,@pet,@wild hon=드시
    feeds=meat,fish,egg,bread,potato,carrot,cabbage,apple,banana,grapes,rice,cheese how=fast,quiet,often,alone
    with=@eats in=restaurant,cafe,park,kitchen,school,house,hotel,garden company
drink | drank | 마시 | | @drink | by=@person,@pet feeds=water,milk hon=드시 how=fast,slow,often
    in=cafe,restaurant,kitchen,office,hotel,park company
cook | | 요리하 | 하 | @cooked | how=often,alone in=kitchen,restaurant,house
make | made | 만들 | | @made | how=well,fast,often,alone in=kitchen,restaurant,house,factory,school
bake | | 굽 | ㅂ | @baked | how=well,often in=kitchen,restaurant,house
buy | bought | 사 | | @goods -money | how=often,again in=market,store,Seoul,Busan,village,airport
sell | sold | 팔 | | @goods -money | how=often in=market,store,Seoul,Busan,village,airport
choose | chose | 고르 | 르 | @worn @bookish @fruit gift flower ring camera car bicycle cake chair bag |
    how=care,slow in=store,market,airport
need | | 필요하 | 하 | @goods friend doctor plan | state adjective 가
have | had | 있 | | @pet @vehicle @kept question plan dream house -money -paper | state 가 not=없
like | | 좋아하 | 하 | @food @drink @pet @subject @sport @pleasure @city flower rose sea mountain forest | state
    short
dislike | | 싫어하 | 하 | @food @drink @wild @subject @sport exam homework work | state short
love | | 사랑하 | 하 | @kin @young -@elder | state
see | saw | 보 | | @person @animal @nature @place @vehicle @shown -@city |
    in=park,zoo,street,forest,station,mountain,beach,village,Seoul
watch | | 보 | | @shown television | how=often,quiet,alone in=theater,house,room,hotel company
read | read | 읽 | | @readable -dictionary | how=quiet,often,loud,slow in=library,room,park,cafe,school,garden,bank
write | wrote | 쓰 | | @written name answer | how=well,often,slow with=@writes in=library,room,cafe,school,hotel
borrow | | 빌리 | | @kept ladder hammer money computer -paper -coin | how=often in=school,office,library,village
lose | lost | 잃어버리 | | @kept money -paper | quick in=park,station,street,market,airport,beach,zoo
find | found | 찾 | | @kept dog cat puppy money answer | asserted how=again
    in=park,room,street,library,garden,forest
receive | | 받 | | @kept money question flower | quick in=office,school,post_office,hotel
meet | met | 만나 | | @person | how=often,again in=station,airport,cafe,park,school,market,street,Seoul
help | | 돕 | ㅂ | @person | humble=도와드리 how=often in=street,hospital,school,station,farm
call | | 부르 | 르 | @person @pet | how=loud,again in=street,playground,classroom
wait for | | 기다리 | | @person @travels | how=quiet,alone in=station,airport,park,cafe,hotel,street
know | knew | 알 | | @person @known | state not=모르
remember | | 기억하 | 하 | @person @known -mistake | state asserted
forget | forgot | 잊 | | @forgotten mistake question plan | quick
believe | | 믿 | | @person story news answer truth | state
teach | taught | 가르치 | | @subject @learned | how=well in=school,museum,Busan,Seoul,church
learn | | 배우 | | @subject @sport @learned | how=hard,fast in=school,Seoul,Korea,museum,America
study | studied | 공부하 | 하 | @subject | how=hard,quiet,alone in=library,school,classroom,room,cafe,America
    company
play | | 하 | 하 | @sport | short how=often,hard in=park,beach,playground,garden,street,school company
open | | 열 | | @opened wallet store | how=care,quiet,slow
close | | 닫 | | @opened store bank library | how=quiet,care
listen to | | 듣 | ㄷ | @audible | how=quiet,often,alone in=room,cafe,park,house,church company
clean up | | 청소하 | 하 | @indoors garden street car store | how=often,fast
wash | | 씻 | | @washed -bottle | how=care,fast in=kitchen,house,river,restaurant
wear | wore | 입 | | @clothes | how=often
build | built | 짓 | ㅅ | @built | how=again in=village,Seoul,mountain,island,city
fix | | 고치 | | @machine chair desk door ladder umbrella | how=again,fast with=hammer
    in=factory,house,garden,office
break | broke | 깨 | | @breaks | quick in=kitchen,restaurant,room,hotel
throw | threw | 던지 | | @thrown hat key rope bottle | in=park,playground,beach,river
catch | caught | 잡 | | @wild ball thief chicken rabbit -tiger -lion | how=fast in=forest,garden,village,mountain
push | | 밀 | | @pushed car chair desk box bicycle | how=slow,care
pull | | 당기 | | @pulled door chair desk table | how=slow,care
carry | carried | 나르 | 르 | @furniture stone ladder pot bottle | how=fast,care in=factory,market,station
load | | 싣 | ㄷ | @furniture bicycle stone piano -mirror | how=fast in=station,factory,market
pick up | | 줍 | ㅂ | @picked key wallet ball ring paper apple | quick in=street,beach,park,forest,playground
pour | | 붓 | ㅅ | @drink | how=slow,care in=kitchen,cafe,restaurant
cut | cut | 자르 | 르 | @cut paper rope tree | how=care,fast with=@cuts in=kitchen,garden,restaurant
draw | drew | 그리 | | @drawn @pet @wild house | how=well,slow with=@writes in=park,beach,museum,school,zoo,lake
ride | rode | 타 | | @vehicle horse -truck | how=often in=park,street,beach,village,Japan company
drive | drove | 운전하 | 하 | @driven | how=care,slow
use | | 사용하 | 하 | @tool @machine @eats dictionary -@vehicle -@learned | how=often,care
    in=office,school,factory,kitchen
visit | | 방문하 | 하 | @visited @kin friend neighbor -@hon | how=often
leave | left | 떠나 | | @left house hospital | quick
cross | | 건너 | | @crossed sea | how=fast,care
raise | | 기르 | 르 | @pet monkey snake | how=well in=farm,house,village,island
plant | | 심 | | @grown | how=care in=garden,farm,park,playground
chase | | 쫓 | | @wild @pet thief | by=dog,cat,lion,tiger,wolf,police_officer,boy,girl,child,farmer,soldier how=fast
    in=street,forest,park,garden
bite | bit | 물 | | @person cat rabbit chicken -@hon -@royal | by=@bites quick noshort
hug | | 안 | | @young @cute friend doll mother grandmother | noshort in=airport,station,house,hospital
praise | | 칭찬하 | 하 | @young @job -@hon -baby | how=often
invite | | 초대하 | 하 | @person -baby -thief | how=again
follow | | 따라가 | | @person @pet | how=quiet,slow in=street,market,forest
prepare | | 준비하 | 하 | @prepared @meal gift class concert | how=care,hard in=kitchen,house,hotel,office
finish | | 끝내 | | @finished | quick
become | became | 되 | | @job -teacher | 가 quick
enjoy | | 즐기 | | @sport music movie game festival trip concert party | noshort in=park,theater,beach,Seoul,Korea
    company
understand | understood | 이해하 | 하 | question problem answer reason plan story math science history poem truth
    mistake | state asserted
solve | | 풀 | | @solved | how=fast,alone in=classroom,library,room company
ask | | 묻 | ㄷ | @asked | how=again,quiet
realize | | 깨닫 | ㄷ | mistake truth reason problem answer price | quick noshort asserted
hide | hid | 숨기 | | gift money letter key secret photo truth ring doll | how=fast,quiet
    in=room,kitchen,garden,forest
move | | 옮기 | | @moved piano pot stone | how=slow,care
turn on | | 켜 | | @switched candle | quick
turn off | | 끄 | | @switched candle | quick
hang | hung | 걸 | | @hung map | how=care
fold | | 접 | | @folded paper newspaper | how=care
tear | tore | 찢 | | @tears newspaper shirt | quick
burn | | 태우 | | @tears meat bread leaf tree newspaper | quick in=garden,kitchen,beach
touch | | 만지 | | @pet @wild doll piano window stone | how=care in=zoo,park,museum,farm
"""

INTRANSITIVE = """
sleep | slept | 자 | | @person @animal -@flies | hon=주무시 how=well,quiet,alone in=room,hotel,house,hospital,temple
run | ran | 달리 | | @person -baby @pet wolf fox -chicken -turtle -bird -duck | how=fast,slow,alone
    in=park,beach,playground,garden,street,school company
walk | | 걷 | ㄷ | @person -baby dog horse elephant turtle cat | how=slow,fast,quiet,alone
    in=park,beach,playground,garden,street,forest company
cry | cried | 울 | | @person -@hon | how=alone,loud,often in=room,hospital,street,airport,station
laugh | | 웃 | | @person | how=loud,often in=classroom,theater,cafe,room company
sing | sang | 노래하 | 하 | @person -baby | how=loud,alone in=theater,park,church,school,room company
dance | | 춤추 | | @person -baby -@hon monkey | how=often in=theater,park,hotel,school company
swim | swam | 수영하 | 하 | @person -baby -@hon | how=often,alone company
work | | 일하 | 하 | @adult uncle aunt mother father husband wife son | how=hard,alone
    in=office,factory,hospital,bank,farm,market,hotel,post_office,Japan,China company
rest | | 쉬 | | @person | how=well,quiet,alone in=room,garden,park,hotel,house,beach company
exercise | | 운동하 | 하 | @person -baby | how=hard,often,alone in=park,playground,school,beach company
cough | | 기침하 | 하 | @person | how=loud,often in=library,classroom,theater,church
fight | fought | 싸우 | | @young @wild @pet soldier king neighbor -baby -@flies -turtle -puppy | how=often
    in=street,playground,forest company
get up | got up | 일어나 | | @person | quick how=late,early
fall down | fell down | 넘어지 | | @person horse | quick in=street,kitchen,mountain,station
bark | | 짖 | | dog puppy wolf fox | thetic how=loud in=street,garden,park
fly | flew | 날 | | @flies duck | how=fast,slow
arrive | | 도착하 | 하 | @person @travels -baby | thetic quick how=late,early
depart | | 출발하 | 하 | @travels car truck | thetic quick how=late,early
stop | | 멈추 | | @vehicle clock music | thetic quick how=sudden
bloom | | 피 | 어 | flower rose | thetic state how=early,late
fall | fell | 떨어지 | | @falls apple cup book picture mirror clock key hat stone star | thetic quick how=sudden
boil | | 끓 | | @boils soup tea | thetic how=fast
begin | began | 시작되 | | @event movie -homework -work | thetic quick noshort how=late,early
end | | 끝나 | | @event movie drama song -homework | thetic quick how=late,early
rise | rose | 뜨 | | @rises | thetic quick how=early,late
shine | shone | 빛나 | | @shines ring coin | thetic state
disappear | | 사라지 | | @wild @kept thief ship star moon cat -paper | thetic quick how=sudden
    in=station,airport,forest,market
appear | | 나타나 | | @wild thief king queen ship star moon | thetic quick how=sudden in=village,forest,street,city
roll | | 구르 | 르 | ball stone coin orange apple bottle watermelon | thetic how=fast,slow
shake | shook | 흔들리 | | tree leaf bridge house ship ladder flower airplane train desk mirror | thetic
grow | grew | 자라 | | @grown @young @pet tree -student | thetic how=fast,well in=garden,farm,forest,village
ring | rang | 울리 | | @rings bell | thetic how=loud
blow | blew | 불 | | wind | thetic
"""

MOTION = """
go to | went to | 가 | | @place | 에 how=often,alone,fast,early company
come to | came to | 오 | | @place -@city | 에 how=often,late,alone,early company
return to | | 돌아오 | | @place | 에 how=late,early,again company
walk to | | 걸어가 | | @place -@city -island -sea | 에 how=slow,alone company
run to | ran to | 달려가 | | @place -@city -island | 에 how=fast company
move to | | 이사하 | 하 | @city village city island | 로 how=again company
enter | | 들어가 | | @indoors store cafe restaurant museum library forest hospital bank theater bookstore temple
    church | 에 quick how=quiet,slow,again
climb | | 오르 | 르 | @climbed tree ladder | 에 how=slow,often company
arrive at | | 도착하 | 하 | @place -kitchen | 에 quick how=late,early company
sit on | sat on | 앉 | | @sat @surface floor stone bridge | 에 quick how=quiet,alone company
lie on | lay on | 눕 | ㅂ | @lain floor beach sofa | 에 quick how=quiet,alone
live in | | 살 | | @city village city house forest | 에 state company
stay at | | 머무르 | 르 | hotel temple house farm hospital school zoo airport | 에 state company
hide in | hid in | 숨 | | forest garden room kitchen house classroom garden store | 에 quick how=alone,fast
"""

DITRANSITIVE = """
give | gave | 주 | | @kept @food @drink flower money | humble=드리 in=school,hospital,airport,station
send | sent | 보내 | | @readable @kept flower money | humble=보내드리 how=often
show | showed | 보여주 | | @kept @worn @readable room house answer | humble=보여드리 in=museum,school,office,cafe
lend | lent | 빌려주 | | @kept @tool money bicycle car computer -paper -candle | humble=빌려드리
teach | taught | 가르치 | | @subject @learned song | humble=가르쳐드리 in=school,church,library
explain | | 설명하 | 하 | @known @hard story plan -name -address | humble=설명해드리 how=slow,again
    in=school,museum,office
read | read | 읽어주 | | book poem letter newspaper novel story | humble=읽어드리 how=slow
    in=library,school,room,hospital
tell | told | 들려주 | | @told dream news reason | humble=들려드리
bring | brought | 가져다주 | | @food @drink @kept chair | humble=가져다드리 how=fast
recommend | | 추천하 | 하 | @bookish @famed @city movie drama music wine | humble=추천해드리
introduce | | 소개하 | 하 | @person -baby -thief | humble=소개해드리
pass | | 건네주 | | @dish @kept letter book | humble=건네드리 quick in=office,kitchen,station,school
"""

REPORTING = """
think | thought | 생각하 | 하 | | quote state
believe | | 믿 | | | quote state
say | said | 말하 | 하 | | quote hon=말씀하시
hear | heard | 듣 | ㄷ | | quote
know | knew | 알 | | | fact state not=모르
hope | | 바라 | | | hope state
"""

WEATHER = """
rain | | 오 | | | says=비가
snow | | 오 | | | says=눈이
"""
