import cProfile,pstats,time,sys
import sys
sys.path.insert(0,'/work/ckpt')
from pathlib import Path
from advisor.replay import *
t=time.process_time();tr=load_trace(Path('/work/shared/data/traces/mooncake_conversation_trace.jsonl.gz'));print('load',time.process_time()-t)
for p,c in (('lru',1000),('lfu',30000)):
    t=time.process_time();r=replay_trace(tr,p,c);print(p,c,time.process_time()-t,r.result())
if len(sys.argv)>1:
    cProfile.run("replay_trace(tr,'lru',1000)",'/tmp/w/prof');pstats.Stats('/tmp/w/prof').sort_stats('tottime').print_stats(14)
